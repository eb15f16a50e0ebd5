"""Divides a batch into micro-batches of arrays, which Ray workers of a node read without a copy."""

from __future__ import annotations

import msgspec
import numpy as np

from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.token_columns import Columns, columns, lengths
from rollout_sched.live.trainer.samples import Batch


def micro_batches(batch: Batch, count: int) -> list[Columns]:
    """The samples in `count` parts of about equally many tokens; each part has whole groups. A part
    of N samples and T tokens has:

    input_ids, position_ids, response_mask, versions  int64 [T], and rollout_log_probs float32 [T]
                    if log-probs were requested: as in `integrations.torch.packed`
    cu_seqlens      int32 [N + 1]  where each sample begins and the last one ends
    prompt_lengths  int64 [N]      tokens of the prompt, with which each sample begins
    uids            str   [N]      group of the sample
    indices         int64 [N]      index of the sample within its group
    staleness       int64 [N]
    rewards         float32 [N]    left out if there is no reward function

    A part may have no samples. Raises CallerError if `count` is less than 1, or if some samples
    have log-probs and others have none.
    """
    if count < 1:
        raise CallerError(f"the number of micro-batches must be at least 1, not {count}")
    parts = batch.balanced(count)
    return [_arrays(msgspec.structs.replace(batch, samples=samples)) for samples in parts]


def _arrays(part: Batch) -> Columns:
    samples = part.samples
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    ends = np.cumsum(lengths(part), dtype=np.int32)
    told: Columns = {"rewards": np.array(rewards, np.float32)} if rewards else {}
    return {
        **columns(part),
        **told,
        "cu_seqlens": np.concatenate([np.zeros(1, np.int32), ends]),
        "prompt_lengths": np.array([len(sample.prompt_ids) for sample in samples], np.int64),
        "uids": np.array([sample.uid for sample in samples], np.str_),
        "indices": np.array([sample.index for sample in samples], np.int64),
        "staleness": np.array([sample.staleness for sample in samples], np.int64),
    }
