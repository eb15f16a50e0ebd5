"""Advantages relative to the group."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.advantages import GroupAdvantages, group_advantages, relative
from rollout_sched.live.trainer.samples import Batch
from tests.integrations.samples import make_sample

#: The groups' samples come mixed, as they are finished.
BATCH = Batch(0, 0, [make_sample(uid, index) for index in range(2) for uid in "ab"])


def test_each_sample_is_held_against_its_own_group() -> None:
    assert group_advantages(BATCH, [1.0, 10.0, 3.0, 10.0], scale=False) == [-1.0, 0.0, 1.0, 0.0]


def test_scaled_advantages_have_unit_deviation() -> None:
    assert relative([0.0, 4.0]) == pytest.approx([-1.0, 1.0], abs=1e-3)


def test_equal_rewards_teach_nothing() -> None:
    assert relative([0.3, 0.3, 0.3]) == pytest.approx([0.0, 0.0, 0.0])


def test_samples_without_reward_do_not_count() -> None:
    rewards = [1.0, math.nan, 3.0, math.nan]
    assert group_advantages(BATCH, rewards, scale=False) == [-1.0, 0.0, 1.0, 0.0]


def test_a_reward_of_each_sample() -> None:
    advantages = GroupAdvantages(lambda sample: sample.index, scale=False)
    assert advantages(BATCH) == [-0.5, -0.5, 0.5, 0.5]


def test_every_sample_needs_one() -> None:
    with pytest.raises(CallerError, match="3 rewards for 4 samples"):
        group_advantages(BATCH, [1.0, 2.0, 3.0])


def test_by_default_the_rewards_that_they_bring() -> None:
    rewards = [1.0, None, 3.0, 10.0]
    samples = [replace(one, reward=r) for one, r in zip(BATCH.samples, rewards, strict=True)]
    advantages = GroupAdvantages(scale=False)(Batch(0, 0, samples))
    assert advantages == [-1.0, 0.0, 1.0, 0.0]
