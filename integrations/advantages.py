"""Advantages relative to a group: what its samples' rewards say about each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from rollout_sched.core.errors import CallerError
from rollout_sched.live.samples import Batch, Sample

#: Keeps the advantages of a group whose rewards are all but equal small.
EPSILON = 1e-4

#: The reward of one sample; NaN if it cannot be told.
Reward = Callable[[Sample], float]


def own_reward(sample: Sample) -> float:
    """What the scheduler's reward function has said of it."""
    return math.nan if sample.reward is None else sample.reward


class GroupAdvantages(msgspec.Struct, frozen=True):
    """The advantages of a batch's samples by a reward for each.

    reward  of a sample; by default the one that it brings
    scale   divide by the standard deviation of the group, as in GRPO (arXiv 2402.03300, 4.1.2);
            without it as in Dr. GRPO (arXiv 2503.20783)
    """

    reward: Reward = own_reward
    scale: bool = True

    def __call__(self, batch: Batch) -> list[float]:
        return group_advantages(
            batch, [self.reward(sample) for sample in batch.samples], scale=self.scale
        )


def group_advantages(batch: Batch, rewards: Sequence[float], *, scale: bool = True) -> list[float]:
    """One advantage for each of `batch.samples`, whose rewards these are in the same order.

    A sample without a reward (NaN) has the advantage 0 and does not count for its siblings. Raises
    CallerError if there are fewer or more rewards than samples.
    """
    if len(rewards) != len(batch.samples):
        raise CallerError(f"{len(rewards)} rewards for {len(batch.samples)} samples: give each one")
    places: dict[str, list[int]] = {}
    for place, sample in enumerate(batch.samples):
        places.setdefault(sample.uid, []).append(place)
    advantages = [0.0] * len(rewards)
    for group in places.values():
        values = relative([rewards[place] for place in group], scale=scale)
        for place, value in zip(group, values, strict=True):
            advantages[place] = value
    return advantages


def relative(rewards: Sequence[float], *, scale: bool = True) -> list[float]:
    """Of one group's samples, as in `group_advantages`; equal rewards teach nothing."""
    values = np.asarray(rewards, dtype=np.float64)
    scored = ~np.isnan(values)
    if not scored.any():
        return [0.0] * len(rewards)
    above = values - values[scored].mean()
    if scale:
        above /= values[scored].std() + EPSILON
    return [float(value) for value in np.where(scored, above, 0.0)]
