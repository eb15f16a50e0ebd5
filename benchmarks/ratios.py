"""A figure of one policy over that of another, on the same draws of a workload."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

import msgspec

from benchmarks.claims import Measure
from rollout_sched.simulators.replay.runs import Run


class Ratio(msgspec.Struct, frozen=True):
    """The geometric mean over the draws, and the lowest and the highest of them."""

    mean: float
    low: float
    high: float

    @property
    def text(self) -> str:
        return f"{self.mean:.2f}x ({self.low:.2f}-{self.high:.2f})"


def ratio(baseline: Sequence[Run], arm: Sequence[Run], measure: Measure) -> Ratio:
    """Above 1 where the arm is better. Runs by draw, the same draws of both."""
    ratios = [
        _better(before, after, measure) for before, after in zip(baseline, arm, strict=True)
    ]
    return Ratio(geometric_mean(ratios), min(ratios), max(ratios))


def _better(before: Run, after: Run, measure: Measure) -> float:
    first, second = before.summary, after.summary
    if measure == "total":
        return first.total_s / second.total_s
    if measure == "rollout":
        return first.rollout_s / second.rollout_s
    if measure == "tokens":
        return second.equal_length_tokens_per_s / first.equal_length_tokens_per_s
    return first.idle_bubble / max(second.idle_bubble, 1e-9)
