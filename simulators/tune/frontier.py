"""The frontier: what is not beaten in speed, staleness and bias all at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from rollout_sched.simulators.tune.limits import CaseFigures

Item = TypeVar("Item")


def frontier(items: Sequence[Item], figures: Callable[[Item], CaseFigures]) -> list[Item]:
    """Those that no other one is as good as in every respect and better in one, fastest first.

    Respects: speed, mean staleness, length bias, step bias; each only as fine as matters (1 %, 0.1
    versions, 0.01), or chance would put nearly all on the frontier. Of equal ones the first.
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
    """Whole numbers, more is better."""
    speed = round(100 * math.log(figures.tokens_per_s)) if figures.tokens_per_s else _NO_SPEED
    return (
        speed,
        -round(10 * figures.staleness_mean),
        -round(100 * figures.length_bias),
        -round(100 * figures.step_bias),
    )


def _dominates(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other and all(mine >= theirs for mine, theirs in zip(one, other, strict=True))
