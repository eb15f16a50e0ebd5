"""Samples as the columns, keys and tags that TransferQueue keeps, by the names verl reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_sched.live.samples import Batch, Sample


def key_of(sample: Sample) -> str:
    """`{uid}_{session}_{i}`, as in verl: a sample of ours is one piece of its session."""
    return f"{sample.uid}_{sample.index}_0"


def tag_of(sample: Sample, batch: Batch) -> dict[str, Any]:
    """What can be read of a sample without its tokens."""
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
    """Columns of whole numbers, a list of its own length for each sample.

    `loss_mask` is verl's other name for `response_mask`; `versions` is -1 where a tool made the
    token.
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
    """The columns of log-probabilities, one for each response token; only those that every sample
    has."""
    columns = {
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        "drawn_log_probs": [sample.drawn_log_probs for sample in samples],
    }
    return {
        name: [values for values in column if values is not None]
        for name, column in columns.items()
        if None not in column
    }


def scores(samples: Sequence[Sample]) -> dict[str, list[list[float]]]:
    """Rewards as verl's trainers read them: `rm_scores` has one number for each response token, all
    of the reward at the last. Only where every sample has one."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if len(rewards) < len(samples):
        return {}
    lengths = [len(sample.response_ids) for sample in samples]
    pairs = zip(rewards, lengths, strict=True)
    return {"rm_scores": [[*[0.0] * (length - 1), reward][:length] for reward, length in pairs]}


def objects(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Columns of anything else."""
    return {
        "uid": [sample.uid for sample in samples],
        "index": [sample.index for sample in samples],
        "finish_reason": [sample.finish_reason for sample in samples],
        "extra": [sample.extra for sample in samples],
        "rewards": [sample.rewards for sample in samples],
    }
