"""Arrays of a batch's tokens; what torch makes of them is in tests/neighbours/torch."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.token_columns import columns, lengths
from tests.integrations.test_micro_batches import batch


def test_one_entry_for_each_token_and_the_prompts_are_filled() -> None:
    made = columns(batch(), lambda batch: [float(n) for n in range(len(batch.samples))])
    tokens = int(lengths(batch()).sum())
    assert {len(column) for column in made.values()} == {tokens}
    assert made["position_ids"][:7].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert made["versions"][:3].tolist() == [-1, -1, 3]
    assert made["rollout_log_probs"][:3].tolist() == [0.0, 0.0, -0.5]
    assert made["advantages"].dtype == np.float32
    assert made["advantages"][7:11].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_log_probs_are_all_there_or_none_are() -> None:
    first, *others = batch().samples
    without = msgspec.structs.replace(first, rollout_log_probs=None)
    with pytest.raises(CallerError, match="'a' has no log-probs"):
        columns(msgspec.structs.replace(batch(), samples=[without, *others]))


def test_an_advantage_for_each_sample() -> None:
    with pytest.raises(CallerError, match="1 advantages for 5 samples"):
        columns(batch(), lambda batch: [1.0])
