"""Converts samples to TransferQueue's columns, keys and tags, with the names that verl reads.

In a module of its own because `writer` imports TransferQueue and torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_sched.live.trainer.samples import Batch, Sample


def key_of(sample: Sample) -> str:
    """`{uid}_{session}_{i}`, as in verl: a sample is the only output of its session, so i is 0."""
    return f"{sample.uid}_{sample.index}_0"


def tag_of(sample: Sample, batch: Batch) -> dict[str, Any]:
    """The facts about a sample that readers get without its tokens."""
    prompt, response = len(sample.prompt_ids), len(sample.response_ids)
    return {
        "status": "success",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": batch.version,
        "min_global_steps": sample.oldest_version,
        "max_global_steps": sample.newest_version,
        "staleness": sample.staleness,
        "batch": batch.number,
    }


def ragged(samples: Sequence[Sample]) -> dict[str, list[list[int]]]:
    """Integer columns, with a list of any length for each sample.

    `loss_mask` is verl's other name for `response_mask`; `versions` is -1 for tokens of a tool.
    """
    whole = [sample.prompt_ids + sample.response_ids for sample in samples]
    masks = [sample.response_mask for sample in samples]
    return {
        "prompts": [sample.prompt_ids for sample in samples],
        "responses": [sample.response_ids for sample in samples],
        "response_mask": masks,
        "loss_mask": masks,
        "input_ids": whole,
        "position_ids": [list(range(len(ids))) for ids in whole],
        "versions": [sample.versions for sample in samples],
    }


def log_probs(samples: Sequence[Sample]) -> dict[str, list[list[float]]]:
    """The column of log-probabilities, one for each response token; left out unless every sample
    has them."""
    values = [one.rollout_log_probs for one in samples if one.rollout_log_probs is not None]
    return {"rollout_log_probs": values} if len(values) == len(samples) else {}


def scores(samples: Sequence[Sample]) -> dict[str, list[list[float]]]:
    """Rewards as verl's trainers read them: `rm_scores` has one number for each response token,
    with the whole reward at the last one. Left out unless every sample has a reward."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if len(rewards) < len(samples):
        return {}
    lengths = [len(sample.response_ids) for sample in samples]
    pairs = zip(rewards, lengths, strict=True)
    return {"rm_scores": [[*[0.0] * (length - 1), reward][:length] for reward, length in pairs]}


def objects(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Columns of all other types."""
    return {
        "uid": [sample.uid for sample in samples],
        "index": [sample.index for sample in samples],
        "finish_reason": [sample.finish_reason for sample in samples],
        "extra": [sample.extra for sample in samples],
        "rewards": [sample.rewards for sample in samples],
    }
