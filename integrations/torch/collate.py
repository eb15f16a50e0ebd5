"""A batch's ragged samples as tensors, padded to a rectangle or packed into one row.

The entry of a token stands at the token's own position, prompt included: the logits that predict
the token at t are those at t - 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.token_columns import Advantages, columns, lengths
from rollout_sched.live.trainer.samples import (
    LARGEST_LOG_RATIO,
    OBSERVED,
    Batch,
    Mismatch,
    TokenMismatch,
)

#: Fill values for positions without a token, if not 0.
_PADDING = {"versions": OBSERVED}


def padded(
    batch: Batch,
    *,
    pad_token_id: int,
    multiple_of: int = 1,
    advantages: Advantages | None = None,
) -> dict[str, torch.Tensor]:
    """A row for each sample, prompt and response, padded on the right to the longest: N samples by
    T tokens.

    input_ids          int64   [N, T]  `pad_token_id` after the end
    attention_mask     int64   [N, T]  1 for every token of prompt and response
    position_ids       int64   [N, T]  0, 1, ... from the first token of the prompt
    response_mask      int64   [N, T]  1 for tokens of the model, 0 for the prompt and the tokens
                                       of tools
    rollout_log_probs  float32 [N, T]  0 where response_mask is 0; left out if none were requested
    versions           int64   [N, T]  policy version of each generated token, -1 for all others
    advantages         float32 [N, T]  the sample's, for each generated token; left out without
                                       `advantages`
    groups             int64   [N]     number of the group in the batch, counted from 0
    rewards            float32 [N]     the sample's; left out if there is no reward function
    number, version    int64   []      the batch's number, and the trainer's version at delivery

    T is a multiple of `multiple_of`. Raises CallerError if some samples have log-probs and others
    have none, or if the numbers of advantages and samples differ.
    """
    tokens = lengths(batch)
    longest = -(-int(tokens.max(initial=0)) // multiple_of) * multiple_of
    here = np.arange(longest) < tokens[:, None]
    flat = {"attention_mask": np.ones(tokens.sum(), np.int64), **columns(batch, advantages)}
    padding = {**_PADDING, "input_ids": pad_token_id}
    tensors = {}
    for name, column in flat.items():
        rows = np.full(here.shape, padding.get(name, 0), column.dtype)
        rows[here] = column
        tensors[name] = torch.from_numpy(rows)
    return tensors | _of_batch(batch)


def packed(batch: Batch, *, advantages: Advantages | None = None) -> dict[str, torch.Tensor]:
    """All samples one after the other in one row of T tokens, without padding.

    The tensors of `padded` with shape [1, T], and `cu_seqlens`, int32 [N + 1]: where each sample
    begins and the last one ends, as FlashAttention's varlen functions take it. There is no
    attention_mask: without one, transformers separates the samples by their position_ids.
    Raises CallerError as `padded` does.
    """
    ends = np.cumsum(lengths(batch), dtype=np.int32)
    tensors = {
        name: torch.from_numpy(column[None]) for name, column in columns(batch, advantages).items()
    }
    tensors["cu_seqlens"] = torch.from_numpy(np.concatenate([np.zeros(1, np.int32), ends]))
    return tensors | _of_batch(batch)


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


def mismatch(
    rows: Mapping[str, torch.Tensor], log_probs: torch.Tensor, *, truncate: float = 2.0
) -> Mismatch:
    """How the trainer's `log_probs` of the tokens in `rows` differ from the rollouts': what
    `report_mismatch` of a client takes.

    rows       of `padded` or `packed`, with rollout_log_probs
    log_probs  in their shape, by the weights of rows["version"], before the optimiser's step
    truncate   the ratio at which importance weights are cut

    Tokens are counted by their version, and by the generated tokens of their sample up to the next
    power of two. Raises CallerError if the rows have no log-probs of the rollouts.
    """
    if "rollout_log_probs" not in rows:
        raise CallerError('no log-probs to compare: submit prompts with sampling {"logprobs": 0}')
    made = rows["response_mask"].bool()
    longest = _generated(rows, made).double().log2().ceil().exp2().long()
    kinds = torch.stack([rows["versions"][made], longest[made]], dim=1)
    off = (log_probs.detach() - rows["rollout_log_probs"])[made].double()
    off = off.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    ratio = off.exp()
    k3 = ratio - 1 - off
    found = []
    for kind in torch.unique(kinds, dim=0):
        of_kind = (kinds == kind).all(dim=1)
        found.append(
            TokenMismatch(
                version=int(kind[0]),
                longest=int(kind[1]),
                tokens=int(of_kind.sum()),
                k3=max(0.0, k3[of_kind].mean().item()),
                max_ratio=ratio[of_kind].max().item(),
                clipped=(ratio[of_kind] > truncate).double().mean().item(),
            )
        )
    return Mismatch(int(rows["version"]), found)


def _generated(rows: Mapping[str, torch.Tensor], made: torch.Tensor) -> torch.Tensor:
    """For each token, how many tokens of its sample were generated."""
    if "cu_seqlens" not in rows:
        return made.sum(dim=1, keepdim=True).expand_as(made)
    ends = rows["cu_seqlens"].long()
    upto = torch.nn.functional.pad(made[0].cumsum(0), (1, 0))
    return upto[ends].diff().repeat_interleave(ends.diff())[None]
