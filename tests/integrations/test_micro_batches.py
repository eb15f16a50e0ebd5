"""A batch in arrays: nothing is lost, and each sample's tokens are where they are said to be."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.token_columns import micro_batches
from rollout_sched.live.trainer.samples import Batch
from tests.integrations.samples import make_sample


def batch(reward: float | None = None) -> Batch:
    sizes = {"a": (2, (5, 7)), "b": (3, (1, 2)), "c": (4, (9,))}
    samples = [
        make_sample(
            uid,
            index,
            [100 * index + n for n in range(response)],
            range(prompt),
            reward=reward,
        )
        for uid, (prompt, responses) in sizes.items()
        for index, response in enumerate(responses)
    ]
    return Batch(0, 4, samples)


def test_every_sample_is_in_one_of_them_with_its_tokens() -> None:
    made = batch()
    by_name = {(s.uid, s.index): s for s in made.samples}
    for part in micro_batches(made, 2):
        ends = part["cu_seqlens"]
        assert len(ends) == len(part["uids"]) + 1
        for place, key in enumerate(zip(part["uids"], part["indices"], strict=True)):
            one = by_name.pop((str(key[0]), int(key[1])))
            here = slice(ends[place], ends[place + 1])
            prompt = int(part["prompt_lengths"][place])
            assert part["input_ids"][here].tolist() == [*one.prompt_ids, *one.response_ids]
            assert prompt == len(one.prompt_ids)
            assert part["response_mask"][here][prompt:].all()
            assert not part["response_mask"][here][:prompt].any()
            assert set(part["versions"][here][prompt:].tolist()) == {3}
            assert part["staleness"][place] == 1
        assert "rewards" not in part
    assert not by_name


def test_groups_stay_whole_and_rewards_come_along() -> None:
    parts = micro_batches(batch(reward=0.25), 3)
    groups = [set(part["uids"].tolist()) for part in parts]
    assert sorted(uid for uids in groups for uid in uids) == ["a", "b", "c"]
    assert all((part["rewards"] == np.float32(0.25)).all() for part in parts)


def test_a_micro_batch_may_be_empty() -> None:
    empty = micro_batches(msgspec.structs.replace(batch(), samples=[]), 1)[0]
    assert empty["cu_seqlens"].tolist() == [0]
    assert not empty["input_ids"].size


def test_less_than_one_is_none() -> None:
    with pytest.raises(CallerError, match="must be at least 1"):
        micro_batches(batch(), 0)
