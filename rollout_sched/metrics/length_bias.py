"""Does a policy prefer short responses? Compares trained with offered response lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.events import GroupSubmitted
from rollout_sched.metrics.fold import Handler, mean

Lengths = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]

#: Least number of random steps that estimate the distance of a step from all groups by chance.
_STEPS_BY_CHANCE = 100


class LengthBias(msgspec.Struct, frozen=True):
    """Trained against offered response lengths: does the policy prefer short responses?

    mean_ratio          mean of all trained over mean of all offered
    steady_mean_ratio   the same for the steps between the first and the drain: mean trained there
                        over the mean that a trainer would have had there that takes its prompts in
                        order; it detects long responses that were put off to the end. None if there
                        are no such steps
    longest_tenth_kept  trained samples as long as the longest tenth of the offered, over these
    ks                  Kolmogorov-Smirnov distance of all trained from all offered
    step_ks             mean over the steps of their distance from all offered; it detects a policy
                        that trains in order of length
    step_ks_floor       step_ks by chance: whole groups dealt at random to steps of these sizes
    group_ratio         mean over the groups of trained over offered mean; it detects a policy that
                        takes the shortest samples of each group
    """

    mean_ratio: float = 1.0
    steady_mean_ratio: float | None = None
    longest_tenth_kept: float = 1.0
    ks: float = 0.0
    step_ks: float = 0.0
    step_ks_floor: float = 0.0
    group_ratio: float = 1.0

    @property
    def step_ks_excess(self) -> float:
        return self.step_ks - self.step_ks_floor


class LengthFold:
    """Collects the lengths. `offered(group)`: the response lengths the trainer asked for."""

    def __init__(self, offered: Callable[[str], Sequence[int]] | None) -> None:
        self._offered_of = offered
        self._submitted: list[str] = []
        self._steps: dict[int, dict[str, list[int]]] = {}  # by batch, by group: trained lengths

    def handlers(self) -> Mapping[type[Any], Handler]:
        if self._offered_of is None:
            return {}
        return {GroupSubmitted: self._submit, Deliver: self._delivered}

    def _submit(self, now: float, event: GroupSubmitted) -> None:
        self._submitted.append(event.group)

    def _delivered(self, now: float, action: Deliver) -> None:
        by_group = self._steps.setdefault(action.batch, {})
        for sample in action.samples:
            by_group.setdefault(sample.group, []).append(sample.response_tokens)

    def bias(self, steady: range = range(0)) -> LengthBias:
        """The bias; `steady`: the numbers of the steps between the first and the drain."""
        steps = list(self._steps.values())
        trained_of = {group: lengths for step in steps for group, lengths in step.items()}
        if not trained_of:
            return LengthBias()
        assert self._offered_of is not None
        # In order of submission, so that the random deal is the same for all policies.
        in_order = dict.fromkeys([*self._submitted, *trained_of])
        asked_of = {group: self._offered_of(group) for group in in_order}
        offered_of = {group: own for group, own in asked_of.items() if group in trained_of}
        offered = _sorted(offered_of.values())
        trained_in = [_sorted(step.values()) for step in steps if step]
        trained = np.sort(np.concatenate(trained_in))
        longest = int(offered[len(offered) - -(-len(offered) // 10)])
        return LengthBias(
            mean_ratio=float(trained.mean() / offered.mean()),
            steady_mean_ratio=self._steady_mean_ratio(steps, asked_of, steady),
            longest_tenth_kept=_at_least(trained, longest) / _at_least(offered, longest),
            ks=_ks_distance(trained, offered),
            step_ks=mean([_ks_distance(step, offered) for step in trained_in]),
            step_ks_floor=_ks_by_chance(
                list(offered_of.values()), [len(step) for step in steps if step]
            ),
            group_ratio=mean(
                [mean(trained_of[group]) / mean(own) for group, own in offered_of.items()]
            ),
        )

    def _steady_mean_ratio(
        self,
        steps: Sequence[Mapping[str, list[int]]],
        asked_of: Mapping[str, Sequence[int]],
        steady: range,
    ) -> float | None:
        before = sum(len(step) for step in steps[: steady.start])
        within = [lengths for n in steady for lengths in steps[n].values()]
        in_turn = self._submitted[before : before + len(within)]
        if not within or not in_turn:
            return None
        trained = [length for lengths in within for length in lengths]
        offered = [length for group in in_turn for length in asked_of[group]]
        return mean(trained) / mean(offered)


def order_excess(steps: Sequence[Sequence[Sequence[int]]]) -> float:
    """The mean distance of steps from all their groups, minus that by chance. A step is a list of
    groups, a group the lengths of its samples."""
    groups = [group for step in steps for group in step]
    every = _sorted(groups)
    distances = [_ks_distance(_sorted(step), every) for step in steps]
    return mean(distances) - _ks_by_chance(groups, [len(step) for step in steps])


def _joined(groups: Iterable[Sequence[int]]) -> Lengths:
    return np.asarray([length for lengths in groups for length in lengths], dtype=np.int64)


def _sorted(groups: Iterable[Sequence[int]]) -> Lengths:
    return np.sort(_joined(groups))


def _at_least(ascending: Lengths, length: int) -> int:
    return len(ascending) - int(np.searchsorted(ascending, length, "left"))


def _ks_by_chance(groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> float:
    """The mean distance of steps from all groups; steps are random and have these sizes."""
    members = np.asarray([len(lengths) for lengths in groups], dtype=np.int64)
    first = np.cumsum(members) - members
    _, rank, count = np.unique(_joined(groups), return_inverse=True, return_counts=True)
    not_longer = np.cumsum(count)
    below, upto = (not_longer - count) / len(rank), not_longer / len(rank)
    ends = np.cumsum(sizes)
    rng = np.random.default_rng(0)
    distances: list[float] = []
    while len(distances) < _STEPS_BY_CHANCE:
        dealt = rng.permutation(len(groups))
        for end, size in zip(ends, sizes, strict=True):
            step = np.sort(rank[_places(dealt[end - size : end], first, members)])
            distances.append(_largest_gap(below[step], upto[step]))
    return mean(distances)


def _places(groups: Lengths, first: Lengths, members: Lengths) -> Lengths:
    """The indices of these groups' lengths, if group g has `members[g]`, from `first[g]` on."""
    count = members[groups]
    ends = np.cumsum(count)
    return np.repeat(first[groups] - ends + count, count) + np.arange(ends[-1])


def _ks_distance(some: Lengths, all_: Lengths) -> float:
    """The largest gap between two empirical distributions, both given ascending."""
    below, upto = np.searchsorted(all_, some, "left"), np.searchsorted(all_, some, "right")
    return _largest_gap(below / len(all_), upto / len(all_))


def _largest_gap(below: Shares, upto: Shares) -> float:
    """The largest gap between the distribution of some ascending lengths and another one, of which
    the share `below` is less than each length and `upto` at most each length.

    The gap is largest just after or just before a jump of the first distribution (the two one-sided
    statistics of Kolmogorov and Smirnov). Of equal lengths the last one gives the gap after the
    jump and the first one that before it; the others give less. So the cost does not depend on the
    number of lengths in the other distribution.
    """
    jumps = np.arange(len(below) + 1) / len(below)
    return float(max((jumps[1:] - upto).max(), (below - jumps[:-1]).max()))
