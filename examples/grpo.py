"""The trainer of the examples: GRPO in torch, corrected for tokens that older weights made.

    advantage   of a sample: its reward less the mean of its group, over the group's standard
                deviation (GRPO, Shao et al., arXiv 2402.03300)
    loss        PPO's clipped objective with the ratio to the weights at the beginning of the step,
                the proximal policy, and each token weighted by how much likelier those make it than
                the weights that drew it, truncated

The split of behaviour and proximal policy is AReaL's decoupled objective (arXiv 2505.24298, section
5.2); truncated importance sampling is Yao et al.'s, "Your efficient RL framework secretly brings
you off-policy RL training" (2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from rollout_sched.client import Batch
from rollout_sched.integrations.advantages import GroupAdvantages
from rollout_sched.integrations.torch import padded

#: Log-probabilities of one token that the same weights tell here and in vLLM may differ by so much:
#: other batches add up the same sums in another order.
SAME = 0.01


class Settings(msgspec.Struct, frozen=True):
    """learning_rate of Adam; clip: of the ratio; truncate: the weight of a token at most;
    minibatches: optimiser steps for each batch."""

    learning_rate: float = 0.015
    clip: float = 0.2
    truncate: float = 2.0
    minibatches: int = 2


class StepFigures(msgspec.Struct, frozen=True):
    """One batch as it was trained.

    older         share of tokens that older weights made
    weight        mean importance weight of those, 1 if there are none
    truncated     share of those whose weight was truncated
    gap           the largest difference of log-probabilities, here and in vLLM, of a token that is
                  said to be by the weights that are trained
    """

    older: float
    weight: float
    truncated: float
    gap: float


class Learner:
    """A model and its optimiser."""

    def __init__(self, model: Path, settings: Settings) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._optimizer = torch.optim.Adam(self._model.parameters(), settings.learning_rate)
        self._settings = settings

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """By the names of the model's checkpoint."""
        yield from self._model.named_parameters()

    def step(self, batch: Batch) -> StepFigures:
        """Train on a batch by the rewards that its samples bring. Raises ValueError if its tokens
        are not by the weights that their versions name."""
        rows = padded(batch, pad_token_id=0, advantages=GroupAdvantages())
        made = rows["response_mask"].bool()
        older = made & (rows["versions"] < batch.version)
        rows["proximal"] = self.log_probs(rows).detach()
        off = rows["proximal"] - rows["rollout_log_probs"]
        gap = (off.abs() * (made & ~older)).max().item()
        if gap > SAME:
            raise ValueError(
                f"log-probabilities of tokens of version {batch.version} are off by {gap:.2g}: the "
                "instances do not compute with the weights they were given; if they are simulated, "
                "their tokens teach nothing"
            )
        rows["weight"] = importance(off, older, self._settings.truncate)
        for part in torch.randperm(len(made)).chunk(self._settings.minibatches):
            self._descend({name: tensor[part] for name, tensor in rows.items() if tensor.ndim})
        weights = rows["weight"][older]
        return StepFigures(
            (older.sum() / made.sum()).item(),
            weights.mean().item() if len(weights) else 1.0,
            (weights >= self._settings.truncate).float().mean().item() if len(weights) else 0.0,
            gap,
        )

    def log_probs(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of each token, [samples, longest]; 0 for what was not generated."""
        ids, attention = rows["input_ids"], rows["attention_mask"]
        logits = self._model(input_ids=ids, attention_mask=attention).logits[:, :-1]
        told = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(told, (1, 0)) * rows["response_mask"]

    def _descend(self, rows: dict[str, torch.Tensor]) -> None:
        ratio = (self.log_probs(rows) - rows["proximal"]).exp()
        gain = rows["weight"] * clipped(ratio, rows["advantages"], self._settings.clip)
        mask = rows["response_mask"]
        loss = -(gain * mask).sum() / mask.sum()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


def importance(off: torch.Tensor, older: torch.Tensor, most: float) -> torch.Tensor:
    """Of each token: min(most, p_proximal / p_behaviour) where older weights made it, else 1.
    `off`: the logarithm of that ratio."""
    return torch.where(older, off.exp().clamp(max=most), torch.ones_like(off))


def clipped(ratio: torch.Tensor, advantage: torch.Tensor, clip: float) -> torch.Tensor:
    """What PPO counts as gained by a token, which is no more than within the clip."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
