"""The frontier: candidates that no other beats in speed, staleness and bias at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from rollout_sched.simulators.tune.limits import CaseFigures

Item = TypeVar("Item")


def frontier(items: Sequence[Item], figures: Callable[[Item], CaseFigures]) -> list[Item]:
    """The items than which no other is as good in every respect and better in one, fastest first.

    Respects: speed, mean staleness, length bias, step bias; each rounded to what matters (1 %, 0.1
    versions, 0.01), because chance would else put nearly all on the frontier. Of equal items only
    the first is kept.
    """
    respects = {id(item): _respects(figures(item)) for item in items}
    kept: dict[tuple[int, ...], Item] = {}
    for item in items:
        mine = respects[id(item)]
        others = (respects[id(other)] for other in items)
        if mine[0] > _NO_SPEED and not any(_dominates(theirs, mine) for theirs in others):
            kept.setdefault(mine, item)
    return [kept[mine] for mine in sorted(kept, reverse=True)]


_NO_SPEED = -(10**9)


def _respects(figures: CaseFigures) -> tuple[int, ...]:
    """Integers of which more is better."""
    speed = round(100 * math.log(figures.tokens_per_s)) if figures.tokens_per_s else _NO_SPEED
    return (
        speed,
        -round(10 * figures.staleness_mean),
        -round(100 * figures.length_bias),
        -round(100 * figures.step_bias),
    )


def _dominates(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other and all(mine >= theirs for mine, theirs in zip(one, other, strict=True))
