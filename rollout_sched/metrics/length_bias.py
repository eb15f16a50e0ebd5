"""Does a policy prefer short answers? Trained against offered response lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_sched.core.actions import Deliver
from rollout_sched.metrics.averages import mean
from rollout_sched.metrics.fold import Handler

Lengths = npt.NDArray[np.int64]
_SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")


class LengthBias(msgspec.Struct, frozen=True):
    """Trained against offered response lengths: does the policy prefer short answers?

    `mean_ratio` and `ks` (Kolmogorov-Smirnov distance) compare everything trained with everything
    offered; `step_ks` is the mean over the steps, which sees a policy that trains short answers
    first; `group_ratio` is the mean over groups of trained over offered mean, which sees one that
    takes the shortest samples of each.
    """

    mean_ratio: float
    ks: float
    step_ks: float
    group_ratio: float


class LengthFold:
    """Gathers the lengths. `offered(group)`: the response lengths the trainer asked for."""

    def __init__(self, offered: Callable[[str], Sequence[int]] | None) -> None:
        self._offered_of = offered
        self._offered: list[int] = []
        self._steps: list[list[int]] = [[]]  # the last one is under way
        self._group_ratios: list[float] = []

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {Deliver: self._delivered} if self._offered_of is not None else {}

    def _delivered(self, now: float, action: Deliver) -> None:
        assert self._offered_of is not None
        by_group: dict[str, list[int]] = {}
        for sample in action.samples:
            by_group.setdefault(sample.group, []).append(sample.response_tokens)
        step = self._steps[-1]
        for lengths in by_group.values():
            step += lengths
        if action.last:
            self._steps.append([])
        for group, lengths in by_group.items():
            offered = self._offered_of(group)
            self._offered.extend(offered)
            self._group_ratios.append(mean(lengths) / mean(offered))

    def bias(self) -> LengthBias:
        if not self._offered:
            return LengthBias(1.0, 0.0, 0.0, 1.0)
        offered = np.sort(np.asarray(self._offered))
        steps = [np.sort(np.asarray(lengths)) for lengths in self._steps if lengths]
        trained = np.sort(np.concatenate(steps))
        return LengthBias(
            mean_ratio=float(trained.mean() / offered.mean()),
            ks=_ks_distance(trained, offered),
            step_ks=mean([_ks_distance(step, offered) for step in steps]),
            group_ratio=mean(self._group_ratios),
        )


def _ks_distance(some: Lengths, all_: Lengths) -> float:
    """The largest gap between two empirical distributions, both given ascending.

    Between two values of `some` its distribution is flat and the other one only grows, so the
    largest gap lies at one of those values or just below it: nothing is done per value of `all_`.
    """
    values = np.unique(some)
    gaps = (
        np.searchsorted(some, values, side) / len(some)
        - np.searchsorted(all_, values, side) / len(all_)
        for side in _SIDES
    )
    return float(max(np.abs(gap).max() for gap in gaps))
