"""Paired comparison: two candidates on the same prompts in the same order, case by case.

Seeds differ more than candidates do; on common seeds this cancels out (common random numbers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from rollout_sched.metrics.averages import mean
from rollout_sched.simulators.tune.limits import CaseFigures

#: Student's t, two-sided 90 %, by degrees of freedom from 1; the normal's beyond.
_STUDENT = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)
_NORMAL = 1.645

#: The half width for a single case, as a share, because its spread is unknown.
_ONE_CASE = 0.05

#: The most speed that is given up for a simpler policy, however large the spread.
_SIMPLER = 0.02

Contender = TypeVar("Contender")


class SpeedUp(msgspec.Struct, frozen=True):
    """The geometric mean of ratios, and its 90 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def speed_up(some: Sequence[CaseFigures], others: Sequence[CaseFigures]) -> SpeedUp:
    """The ratio of accepted tokens per second, case by case; both need figures for every case."""
    logs = [
        math.log(one.tokens_per_s / other.tokens_per_s)
        for one, other in zip(some, others, strict=True)
    ]
    middle = mean(logs)
    half = _half_width(logs)
    return SpeedUp(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def _half_width(logs: Sequence[float]) -> float:
    count = len(logs)
    if count < 2:
        return math.log1p(_ONE_CASE)
    middle = mean(logs)
    variance = sum((value - middle) ** 2 for value in logs) / (count - 1)
    student = _STUDENT[count - 2] if count - 2 < len(_STUDENT) else _NORMAL
    return student * math.sqrt(variance / count)


def simplest_of_the_best(
    contenders: Sequence[Contender],
    against: Callable[[Contender, Contender], SpeedUp],
    departures: Callable[[Contender], int],
) -> Contender:
    """The fastest, unless a simpler one is slower by no more than the spread, and by 2 % at most.

    The one-standard-error rule of Breiman et al. (Classification and Regression Trees, 1984), on
    paired differences. Among equally simple ones the faster wins. `contenders`: at least one.
    """
    first = contenders[0]
    speed = {id(one): against(one, first).mean for one in contenders}
    fastest = max(contenders, key=lambda one: speed[id(one)])
    level = []
    for one in contenders:
        ahead = against(fastest, one)
        if ahead.low <= 1.0 and ahead.mean <= 1 + _SIMPLER:
            level.append(one)
    return min(level, key=lambda one: (departures(one), -speed[id(one)]))
