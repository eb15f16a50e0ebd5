"""A batch's ragged samples as tensors, padded to a rectangle or packed into one row.

Whatever is one entry per token stands at that token's own place, prompt included: the logits that
predict the token at t are those at t - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_sched.core.errors import CallerError
from rollout_sched.live.samples import OBSERVED, Batch, Sample

#: One advantage for each of the batch's samples, such as `integrations.advantages.GroupAdvantages`.
Advantages = Callable[[Batch], Sequence[float]]

_Columns = dict[str, NDArray[np.generic]]

#: What stands where no token is.
_PADDING = {"versions": OBSERVED}


def padded(
    batch: Batch,
    *,
    pad_token_id: int,
    multiple_of: int = 1,
    advantages: Advantages | None = None,
) -> dict[str, torch.Tensor]:
    """A row for each sample, prompt and response, filled up on the right to the longest, N samples
    by T tokens.

    input_ids          int64   [N, T]  `pad_token_id` after the end
    attention_mask     int64   [N, T]  1 for every token of prompt and response
    position_ids       int64   [N, T]  0, 1, ... from the first token of the prompt
    response_mask      int64   [N, T]  1 for what the model generated: neither prompt nor what a
                                       tool returned
    rollout_log_probs  float32 [N, T]  0 outside of that; left out if none were asked for
    versions           int64   [N, T]  policy version of each generated token, -1 for all others
    advantages         float32 [N, T]  of its sample, for each generated token; left out without
                                       `advantages`
    groups             int64   [N]     which group of the batch, counted from 0
    rewards            float32 [N]     of its sample; left out if there is no reward function
    number, version    int64   []      the batch's own, and the trainer's at delivery

    T is a multiple of `multiple_of`. Raises CallerError if some samples have log-probs and others
    have none, or there are not as many advantages as samples.
    """
    lengths = _lengths(batch)
    longest = -(-int(lengths.max(initial=0)) // multiple_of) * multiple_of
    here = np.arange(longest) < lengths[:, None]
    columns = {"attention_mask": np.ones(lengths.sum(), np.int64), **_columns(batch, advantages)}
    padding = {**_PADDING, "input_ids": pad_token_id}
    tensors = {}
    for name, column in columns.items():
        rows = np.full(here.shape, padding.get(name, 0), column.dtype)
        rows[here] = column
        tensors[name] = torch.from_numpy(rows)
    return tensors | _of_batch(batch)


def packed(batch: Batch, *, advantages: Advantages | None = None) -> dict[str, torch.Tensor]:
    """All samples one after the other in one row of T tokens, without padding.

    The same tensors as of `padded`, of shape [1, T], with `cu_seqlens`, int32 [N + 1], where each
    sample begins and the last one ends, as FlashAttention's varlen functions take it. There is no
    attention_mask: given none, transformers tells the samples apart by their position_ids.
    Raises CallerError as `padded` does.
    """
    ends = np.cumsum(_lengths(batch), dtype=np.int32)
    tensors = {
        name: torch.from_numpy(column[None]) for name, column in _columns(batch, advantages).items()
    }
    tensors["cu_seqlens"] = torch.from_numpy(np.concatenate([np.zeros(1, np.int32), ends]))
    return tensors | _of_batch(batch)


def _lengths(batch: Batch) -> NDArray[np.int64]:
    return np.array([_length(sample) for sample in batch.samples], np.int64)


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)


def _columns(batch: Batch, advantages: Advantages | None) -> _Columns:
    """One entry for each token of all samples, in order."""
    samples = batch.samples
    columns: _Columns = {
        "input_ids": _joined([[*s.prompt_ids, *s.response_ids] for s in samples], np.int64),
        "position_ids": _joined([range(_length(s)) for s in samples], np.int64),
        "response_mask": _after_prompts(samples, [s.response_mask for s in samples], 0, np.int64),
        "versions": _after_prompts(samples, [s.versions for s in samples], OBSERVED, np.int64),
    }
    log_probs = _log_probs(samples)
    if log_probs is not None:
        columns["rollout_log_probs"] = _after_prompts(samples, log_probs, 0.0, np.float32)
    if advantages is not None:
        values = np.asarray(advantages(batch), np.float32)
        if len(values) != len(samples):
            raise CallerError(f"{len(values)} advantages for {len(samples)} samples: give each one")
        columns["advantages"] = np.repeat(values, _lengths(batch)) * columns[
            "response_mask"
        ].astype(np.float32)
    return columns


def _log_probs(samples: Sequence[Sample]) -> list[list[float]] | None:
    found = [s.rollout_log_probs for s in samples if s.rollout_log_probs is not None]
    if found and len(found) < len(samples):
        without = next(s.uid for s in samples if s.rollout_log_probs is None)
        raise CallerError(
            f"group {without!r} has no log-probs and others of its batch have: submit all prompts "
            'with sampling {"logprobs": 0}, or none'
        )
    return found or None


def _after_prompts(
    samples: Sequence[Sample], responses: Sequence[Sequence[float]], fill: float, dtype: type
) -> NDArray[np.generic]:
    """What is one entry per response token, with `fill` for each prompt token before it."""
    rows = (
        [fill] * len(sample.prompt_ids) + list(response)
        for sample, response in zip(samples, responses, strict=True)
    )
    return _joined(rows, dtype)


def _joined(rows: Iterable[Sequence[float]], dtype: type) -> NDArray[np.generic]:
    return np.concatenate([np.zeros(0, dtype), *(np.array(row, dtype) for row in rows)])


def _of_batch(batch: Batch) -> dict[str, torch.Tensor]:
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault(sample.uid, len(numbers)) for sample in batch.samples]
    rewards = [sample.reward for sample in batch.samples if sample.reward is not None]
    told = {"rewards": torch.tensor(rewards, dtype=torch.float32)} if rewards else {}
    return {
        **told,
        "groups": torch.tensor(groups, dtype=torch.int64),
        "number": torch.tensor(batch.number),
        "version": torch.tensor(batch.version),
    }
