"""The trainer of the examples: what its formulas give, and whom it does not believe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from examples.grpo import Learner, Settings, clipped, importance
from examples.grpo_tiny import share
from rollout_sched.client import Batch, Sample
from rollout_sched.integrations.torch import padded
from tests.vllm import tiny_model

PROMPT = [5, 6, 7]


def sample(
    uid: str, index: int, response: list[int], log_probs: list[float], version: int
) -> Sample:
    count = len(response)
    return Sample(
        uid,
        index,
        PROMPT,
        response,
        [1] * count,
        log_probs,
        [version] * count,
        [],
        0,
        "stop",
        "COMPLETED",
        0,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grpo") / "tiny"
    tiny_model.main([str(path), "--vocab", "512", "--hidden", "64", "--heads", "2"])
    return path


def drawn(model: Any, count: int, length: int) -> tuple[list[int], list[float]]:
    """A response of the model's own, with its log-probabilities."""
    ids, told = list(PROMPT), []
    for _ in range(length):
        with torch.no_grad():
            log_probs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        token = int(torch.multinomial(log_probs.exp(), 1))
        ids.append(token)
        told.append(float(log_probs[token]))
    return ids[len(PROMPT) :], told


def batch_of(folder: Path, version: int, made_by: int) -> Batch:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    samples = [
        sample(uid, index, *drawn(model, index, 4 + index), made_by)
        for uid in "ab"
        for index in range(4)
    ]
    return Batch(0, version, samples)


def worth(batch: Batch, reward: Callable[[Sample], float]) -> Batch:
    """The batch with these rewards."""
    return replace(batch, samples=[replace(one, reward=reward(one)) for one in batch.samples])


def wanted(sample: Sample) -> float:
    return share(sample.response_ids)


def by_turns(sample: Sample) -> float:
    return float(sample.index % 2)


def test_the_log_probs_of_the_weights_that_are_trained_are_told_alike(folder: Path) -> None:
    batch = batch_of(folder, version=3, made_by=3)
    figures = Learner(folder, Settings()).step(worth(batch, wanted))
    assert figures.gap < 1e-4, "ragged responses, each at its place"
    assert (figures.older, figures.weight, figures.truncated) == (0.0, 1.0, 0.0)


def test_tokens_that_contradict_their_version_are_not_trained(folder: Path) -> None:
    batch = batch_of(folder, version=3, made_by=3)
    other = Learner(folder, Settings(learning_rate=0.05))
    other.step(worth(batch, by_turns))
    with pytest.raises(ValueError, match="cannot be used for training"):
        other.step(worth(batch, wanted))


def test_older_tokens_are_weighted(folder: Path) -> None:
    batch = batch_of(folder, version=3, made_by=2)
    learner = Learner(folder, Settings(learning_rate=0.05))
    first = learner.step(worth(batch, by_turns))
    assert (first.older, first.gap) == (1.0, 0.0)
    assert first.weight == pytest.approx(1.0, abs=1e-3), "by the same weights, whatever they say"
    second = learner.step(worth(batch, by_turns))
    assert abs(second.weight - 1.0) > 0.01
    assert second.weight <= Settings().truncate


def test_a_step_goes_towards_the_reward(folder: Path) -> None:
    batch = batch_of(folder, version=3, made_by=2)
    best = batch.samples[0]
    alone = padded(Batch(0, 3, [best]), pad_token_id=0)
    learner = Learner(folder, Settings(learning_rate=0.003, minibatches=1))
    before = learner.log_probs(alone).sum().item()
    learner.step(worth(batch, lambda sample: float(sample is best)))
    assert learner.log_probs(alone).sum().item() > before


def test_its_weights_are_those_of_the_checkpoint(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {name for name, _ in Learner(folder, Settings()).weights()}


def test_importance_is_truncated_and_of_older_tokens_only() -> None:
    off = torch.tensor([[3.0, 3.0, -1.0]])
    older = torch.tensor([[True, False, True]])
    weight = importance(off, older, 2.0)
    assert weight[0].tolist() == pytest.approx([2.0, 1.0, 0.3679], abs=1e-4)


@pytest.mark.parametrize(("advantage", "gain"), [(1.0, 1.2), (-1.0, -1.5)])
def test_what_is_gained_is_clipped_where_that_is_lower(advantage: float, gain: float) -> None:
    told = clipped(torch.tensor([1.5]), torch.tensor([advantage]), 0.2)
    assert told.item() == pytest.approx(gain, abs=1e-5)
