"""Group-relative advantages of samples, computed from their rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from rollout_sched.core.errors import CallerError
from rollout_sched.live.trainer.samples import Batch, Sample

#: Keeps advantages small if the rewards of a group are almost equal.
EPSILON = 1e-4

#: The reward of one sample; NaN if it is unknown.
Reward = Callable[[Sample], float]


def own_reward(sample: Sample) -> float:
    """The reward from the scheduler's reward function; NaN without one."""
    return math.nan if sample.reward is None else sample.reward


class GroupAdvantages(msgspec.Struct, frozen=True):
    """The advantages of a batch's samples, from a reward for each.

    reward  returns the reward of a sample; default: the reward stored in the sample
    scale   divide by the standard deviation of the group, as in GRPO (arXiv 2402.03300, 4.1.2);
            False: as in Dr. GRPO (arXiv 2503.20783)
    """

    reward: Reward = own_reward
    scale: bool = True

    def __call__(self, batch: Batch) -> list[float]:
        return group_advantages(
            batch, [self.reward(sample) for sample in batch.samples], scale=self.scale
        )


def group_advantages(batch: Batch, rewards: Sequence[float], *, scale: bool = True) -> list[float]:
    """One advantage for each of `batch.samples`; `rewards` has the same order.

    A sample without a reward (NaN) has the advantage 0 and does not affect its siblings. Raises
    CallerError if the numbers of rewards and samples differ.
    """
    if len(rewards) != len(batch.samples):
        raise CallerError(f"{len(rewards)} rewards for {len(batch.samples)} samples: give one each")
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
    """The advantages of one group, as in `group_advantages`; equal rewards give 0."""
    values = np.asarray(rewards, dtype=np.float64)
    scored = ~np.isnan(values)
    if not scored.any():
        return [0.0] * len(rewards)
    above = values - values[scored].mean()
    if scale:
        above /= values[scored].std() + EPSILON
    return [float(value) for value in np.where(scored, above, 0.0)]
