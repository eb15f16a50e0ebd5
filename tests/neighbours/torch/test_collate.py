"""Shapes, dtypes, and each token's facts at the token's own place."""

from __future__ import annotations

import math

import pytest
import torch
from msgspec.structs import replace

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.advantages import GroupAdvantages
from rollout_sched.integrations.torch import mismatch, packed, padded
from rollout_sched.live.trainer.samples import Batch, Sample

PAD = 99


def sample(
    uid: str,
    index: int,
    prompt: list[int],
    response: list[int],
    mask: list[int] | None = None,
    log_probs: bool = True,
) -> Sample:
    """Token k of the response was made by version k and has the log-prob -k."""
    return Sample(
        uid,
        index,
        prompt,
        response,
        mask or [1] * len(response),
        [-float(k) for k in range(len(response))] if log_probs else None,
        list(range(len(response))),
        [],
        0,
        "stop",
        "COMPLETED",
        0,
    )


TURNS = sample("a", 1, [1, 2], [6, 7, 8, 9], mask=[1, 0, 0, 1])
BATCH = Batch(3, 7, [sample("a", 0, [1, 2], [5]), sample("b", 0, [3], [4, 4]), TURNS])
REWARDS = GroupAdvantages(lambda sample: float(sample.index), scale=False)
TOKENS = 3 + 3 + 6


def test_padded() -> None:
    got = padded(BATCH, pad_token_id=PAD, advantages=REWARDS)
    assert got["input_ids"].tolist() == [
        [1, 2, 5, PAD, PAD, PAD],
        [3, 4, 4, PAD, PAD, PAD],
        [1, 2, 6, 7, 8, 9],
    ]
    assert got["attention_mask"].tolist() == [[1] * 3 + [0] * 3] * 2 + [[1] * 6]
    assert got["position_ids"].tolist() == [[0, 1, 2, 0, 0, 0]] * 2 + [[0, 1, 2, 3, 4, 5]]
    assert got["response_mask"].tolist() == [
        [0, 0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 1],
    ]
    assert got["versions"].tolist() == [
        [-1, -1, 0, -1, -1, -1],
        [-1, 0, 1, -1, -1, -1],
        [-1, -1, 0, 1, 2, 3],
    ]
    assert got["rollout_log_probs"][2].tolist() == [0, 0, 0, -1, -2, -3]
    assert got["advantages"].tolist() == [
        [0, 0, -0.5, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0.5, 0, 0, 0.5],
    ]
    assert got["groups"].tolist() == [0, 1, 0]
    assert (got["number"].item(), got["version"].item()) == (3, 7)


def test_packed_is_padded_without_the_padding() -> None:
    rows = padded(BATCH, pad_token_id=PAD, advantages=REWARDS)
    row = packed(BATCH, advantages=REWARDS)
    here = rows["attention_mask"].bool()
    of_tokens = set(rows) - {"attention_mask", "groups", "number", "version"}
    assert set(row) == of_tokens | {"cu_seqlens", "groups", "number", "version"}
    for name in of_tokens:
        assert row[name].shape == (1, TOKENS)
        assert torch.equal(row[name][0], rows[name][here]), name
    assert row["cu_seqlens"].tolist() == [0, 3, 6, 12]


def test_types() -> None:
    row = packed(BATCH, advantages=REWARDS)
    assert {name: tensor.dtype for name, tensor in row.items()} == {
        "input_ids": torch.int64,
        "position_ids": torch.int64,
        "response_mask": torch.int64,
        "versions": torch.int64,
        "rollout_log_probs": torch.float32,
        "advantages": torch.float32,
        "cu_seqlens": torch.int32,
        "groups": torch.int64,
        "number": torch.int64,
        "version": torch.int64,
    }


def test_rows_of_a_multiple() -> None:
    assert padded(BATCH, pad_token_id=PAD, multiple_of=8)["input_ids"].shape == (3, 8)


def test_log_probs_that_nobody_asked_for() -> None:
    batch = Batch(0, 0, [sample("a", 0, [1], [2], log_probs=False)])
    got = padded(batch, pad_token_id=PAD)
    assert "rollout_log_probs" not in got
    assert "advantages" not in got


def test_log_probs_of_some_samples() -> None:
    batch = Batch(0, 0, [sample("a", 0, [1], [2]), sample("b", 0, [1], [2], log_probs=False)])
    with pytest.raises(CallerError, match="'b' has no log-probs"):
        packed(batch)


def test_too_few_advantages() -> None:
    with pytest.raises(CallerError, match="1 advantages for 3 samples"):
        packed(BATCH, advantages=lambda batch: [0.0])


def test_a_last_part_may_be_empty() -> None:
    empty = Batch(1, 0, [])
    assert padded(empty, pad_token_id=PAD)["input_ids"].shape == (0, 0)
    assert packed(empty)["cu_seqlens"].tolist() == [0]


def test_rewards_where_there_are_some() -> None:
    assert "rewards" not in padded(BATCH, pad_token_id=PAD)
    scored = [replace(one, reward=0.5 * k) for k, one in enumerate(BATCH.samples)]
    for tensors in (padded(Batch(3, 7, scored), pad_token_id=PAD), packed(Batch(3, 7, scored))):
        assert tensors["rewards"].dtype == torch.float32
        assert tensors["rewards"].tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("arranged", [lambda batch: padded(batch, pad_token_id=PAD), packed])
def test_the_trainers_log_probs_are_compared_by_version_and_length(arranged) -> None:
    rows = arranged(BATCH)
    off = torch.zeros_like(rows["rollout_log_probs"])
    off[rows["versions"] == 1] = math.log(3.0)
    off[rows["response_mask"] == 0] = math.nan  # what a trainer has there says nothing
    found = mismatch(rows, rows["rollout_log_probs"] + off)
    assert found.version == 7
    assert [(kind.version, kind.longest, kind.tokens) for kind in found.kinds] == [
        (0, 1, 1),
        (0, 2, 2),
        (1, 2, 1),
        (3, 2, 1),
    ]
    exact, far = found.kinds[0], found.kinds[2]
    assert (exact.k3, exact.max_ratio, exact.clipped) == (0.0, 1.0, 0.0)
    assert far.k3 == pytest.approx(3.0 - 1.0 - math.log(3.0), rel=1e-6)
    assert far.max_ratio == pytest.approx(3.0, rel=1e-6)
    assert far.clipped == 1.0


def test_a_token_that_the_trainer_excludes_is_finite_too() -> None:
    rows = padded(BATCH, pad_token_id=PAD)
    (kind, *_) = mismatch(rows, torch.full_like(rows["rollout_log_probs"], -math.inf)).kinds
    assert 18.9 < kind.k3 < 19.1
    empty = mismatch(
        padded(Batch(1, 0, []), pad_token_id=PAD) | {"rollout_log_probs": torch.zeros(0, 0)},
        torch.zeros(0, 0),
    )
    assert empty.kinds == []


def test_nothing_can_be_compared_without_the_rollouts_log_probs() -> None:
    batch = Batch(0, 0, [sample("a", 0, [1], [2], log_probs=False)])
    with pytest.raises(CallerError, match="no log-probs to compare"):
        mismatch(padded(batch, pad_token_id=PAD), torch.zeros(1, 2))
