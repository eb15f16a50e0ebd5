"""Scores the samples of one group with reward functions in TRL's form."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.advantages import relative
from rollout_sched.live.trainer.samples import Sample

#: Takes the keywords `prompts`, `completions`, `completion_ids` and the data set's other columns;
#: returns a list with one reward, or None, for each completion. Plain or coroutine function.
RewardFunc = Callable[..., Any]


class Scores(msgspec.Struct, frozen=True):
    """One entry for each sample of the group. A reward that no function gave is NaN."""

    completions: list[Any]
    by_func: dict[str, list[float]]
    rewards: list[float]
    advantages: list[float]

    def metrics(self, index: int) -> dict[str, float]:
        """The metrics of one sample, as AsyncGRPOTrainer logs them."""
        by_func = {f"rewards/{name}": values[index] for name, values in self.by_func.items()}
        return {
            "reward": self.rewards[index],
            "reward_std": float(np.nanstd(self.rewards)) if self._scored else math.nan,
            **by_func,
        }

    @property
    def _scored(self) -> bool:
        return not all(math.isnan(reward) for reward in self.rewards)


async def score(
    reward_funcs: Sequence[RewardFunc],
    row: Mapping[str, Any],
    samples: Sequence[Sample],
    processing_class: Any,
) -> Scores:
    """The sum of the functions' rewards for each sample, plus the scheduler's own reward if it has
    one ("scheduler"). Raises what the functions raise, and CallerError if a function does not
    return one reward for each sample."""
    completions = _completions(row["prompt"], samples, processing_class)
    columns = {
        "prompts": [row["prompt"]] * len(samples),
        "completions": completions,
        "completion_ids": [sample.response_ids for sample in samples],
        **{name: [row[name]] * len(samples) for name in row if name != "prompt"},
    }
    found = await asyncio.gather(*(_call(func, columns) for func in reward_funcs))
    by_func = {}
    if all(sample.reward is not None for sample in samples):
        by_func["scheduler"] = [sample.reward for sample in samples if sample.reward is not None]
    for func, rewards in zip(reward_funcs, found, strict=True):
        if len(rewards) != len(samples):
            raise CallerError(
                f"reward function {_name(func)} gave {len(rewards)} rewards for {len(samples)} "
                "completions: return one for each"
            )
        by_func[_name(func)] = [math.nan if reward is None else float(reward) for reward in rewards]
    sums = [_sum(of_sample) for of_sample in zip(*by_func.values(), strict=True)]
    return Scores(completions, by_func, sums, relative(sums))


async def _call(func: RewardFunc, columns: Mapping[str, Any]) -> Sequence[float | None]:
    if inspect.iscoroutinefunction(func):
        rewards: Sequence[float | None] = await func(**columns)
    else:
        rewards = await asyncio.to_thread(func, **columns)
    return rewards


def _completions(prompt: Any, samples: Sequence[Sample], processing_class: Any) -> list[Any]:
    """Text if the prompt is text, messages if it is messages."""
    ids = [sample.response_ids for sample in samples]
    texts = processing_class.batch_decode(ids, skip_special_tokens=True)
    if isinstance(prompt, str):
        return list(texts)
    return [[{"role": "assistant", "content": text}] for text in texts]


def _sum(rewards: Sequence[float]) -> float:
    told = [reward for reward in rewards if not math.isnan(reward)]
    return sum(told) if told else math.nan


def _name(func: RewardFunc) -> str:
    return getattr(func, "__name__", type(func).__name__)
