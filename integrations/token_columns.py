"""A batch's ragged samples as arrays: one entry for each token of all samples, in order.

The entry of a token stands at the token's own position, prompt included: the logits that predict
the token at t are those at t - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout_sched.core.errors import CallerError
from rollout_sched.live.trainer.samples import OBSERVED, Batch, Sample

#: One advantage for each of the batch's samples, such as `integrations.advantages.GroupAdvantages`.
Advantages = Callable[[Batch], Sequence[float]]

Columns = dict[str, NDArray[np.generic]]


def lengths(batch: Batch) -> NDArray[np.int64]:
    """Tokens of each sample, prompts included."""
    return np.array([_length(sample) for sample in batch.samples], np.int64)


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)


def columns(batch: Batch, advantages: Advantages | None = None) -> Columns:
    """Arrays with the names of `torch.collate.packed`. Raises CallerError if some samples have
    log-probs and others have none, or if the numbers of advantages and samples differ."""
    samples = batch.samples
    made: Columns = {
        "input_ids": _joined([[*s.prompt_ids, *s.response_ids] for s in samples], np.int64),
        "position_ids": _joined([range(_length(s)) for s in samples], np.int64),
        "response_mask": _after_prompts(samples, [s.response_mask for s in samples], 0, np.int64),
        "versions": _after_prompts(samples, [s.versions for s in samples], OBSERVED, np.int64),
    }
    log_probs = _log_probs(samples)
    if log_probs is not None:
        made["rollout_log_probs"] = _after_prompts(samples, log_probs, 0.0, np.float32)
    if advantages is not None:
        values = np.asarray(advantages(batch), np.float32)
        if len(values) != len(samples):
            raise CallerError(f"{len(values)} advantages for {len(samples)} samples: give one each")
        mask = made["response_mask"].astype(np.float32)
        made["advantages"] = np.repeat(values, lengths(batch)) * mask
    return made


def _log_probs(samples: Sequence[Sample]) -> list[list[float]] | None:
    found = [s.rollout_log_probs for s in samples if s.rollout_log_probs is not None]
    if found and len(found) < len(samples):
        without = next(s.uid for s in samples if s.rollout_log_probs is None)
        raise CallerError(
            f"group {without!r} has no log-probs, but other groups of the batch do: submit all "
            'prompts with sampling {"logprobs": 0}, or none'
        )
    return found or None


def _after_prompts(
    samples: Sequence[Sample], responses: Sequence[Sequence[float]], fill: float, dtype: type
) -> NDArray[np.generic]:
    """A column of one entry per response token, with `fill` for each prompt token before it."""
    rows = (
        [fill] * len(sample.prompt_ids) + list(response)
        for sample, response in zip(samples, responses, strict=True)
    )
    return _joined(rows, dtype)


def _joined(rows: Iterable[Sequence[float]], dtype: type) -> NDArray[np.generic]:
    return np.concatenate([np.zeros(0, dtype), *(np.array(row, dtype) for row in rows)])


# ------------------------------------------------------------------------------------------
# Divides a batch into micro-batches of arrays, which Ray workers of a node read without a copy.


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
