"""A tiny model, a data set, and GRPO on the CPU: what TRL's trainer needs to take a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.vllm.tiny_model import main as write_tiny_model

VOCABULARY = 512
FAKE = ["--vocab-size", str(VOCABULARY), "--speed", "50"]
PROMPTS = ["one", "two", "three", "four"]
GENERATIONS = 2
COMPLETION_TOKENS = 8
WAIT_S = 120.0


def write_model(folder: Path, seed: int = 0) -> Path:
    """A random Llama with a tokenizer of bytes."""
    sizes = ["--vocab", str(VOCABULARY), "--hidden", "64", "--heads", "2", "--kv-heads", "1"]
    write_tiny_model([str(folder), "--seed", str(seed), *sizes])
    return folder


def dataset(prompts: list[Any] | None = None) -> Dataset:
    """With a column of its own for the rewards."""
    prompts = prompts or PROMPTS
    return Dataset.from_dict({"prompt": prompts, "weight": [1.0] * len(prompts)})


def reward_even(completion_ids: list[list[int]], weight: list[float], **_: Any) -> list[float]:
    """The share of even tokens, which siblings differ in."""
    return [
        factor * sum(token % 2 == 0 for token in ids) / len(ids)
        for ids, factor in zip(completion_ids, weight, strict=True)
    ]


def config(folder: Path, **options: Any) -> GRPOConfig:
    """Two prompts of two completions in every step, all its weights moving visibly."""
    given = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 2 * GENERATIONS,
        "num_generations": GENERATIONS,
        "max_completion_length": COMPLETION_TOKENS,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    }
    return GRPOConfig(**given | options)


def trainer(
    model: Path, args: GRPOConfig, reward: Callable[..., Any] = reward_even, **options: Any
) -> GRPOTrainer:
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        args=args,
        train_dataset=options.pop("train_dataset", None) or dataset(),
        **options,
    )


def moved(before: Mapping[str, torch.Tensor], model: torch.nn.Module) -> bool:
    """Whether training has changed every weight, and to finite numbers."""
    return all(
        bool(torch.isfinite(now).all()) and not torch.equal(now, before[name])
        for name, now in model.state_dict().items()
    )


def copy_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def wait_until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.02)
