"""GRPO on a tiny model with TRL's GRPOTrainer and a real vLLM server on the CPU.

    make example-trl        # or: python -m examples.grpo_trl --steps 30

Model, server and reward are those of `grpo_tiny`. TRL computes advantages, loss and steps. The
scheduler delivers completions in groups, and after every step the server loads the new weights.
"""

from __future__ import annotations

import argparse
import random
import string
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from examples.grpo_tiny import STOP, Job, share
from examples.learning_curves import Point, table
from examples.tiny_servers import Fleet, servers
from rollout_sched import RolloutScheduler
from rollout_sched.core.errors import RolloutError
from rollout_sched.integrations.trl import CheckpointTransfer, RolloutFunc

POLICY = "round_robin_sync"  # the trainer waits for every completion of its prompts


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of wanted tokens in each."""
    return [share(token_ids) for token_ids in completion_ids]


def prompts(job: Job) -> Dataset:
    """Prompts of eight letters each."""
    rng = random.Random(job.seed)
    texts = ["".join(rng.choices(string.ascii_letters, k=8)) for _ in range(job.prompts_per_step)]
    return Dataset.from_dict({"prompt": texts})


def config(job: Job, folder: Path) -> GRPOConfig:
    """The trainer's configuration: one step per batch."""
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=job.seed,
        max_steps=job.steps,
        per_device_train_batch_size=job.prompts_per_step * job.samples,
        num_generations=job.samples,
        max_completion_length=job.max_tokens,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        generation_kwargs={"stop_token_ids": STOP, "ignore_eos": True},
    )


class Curve(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Prints and keeps the reward of every step."""

    def __init__(self, samples: int) -> None:
        self.points: list[Point] = []
        self._samples = samples
        self._start = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "reward" in logs:
            seconds = time.monotonic() - self._start
            trained = (len(self.points) + 1) * self._samples
            self.points.append(Point(seconds, trained, float(logs["reward"])))
            told = f"step {len(self.points):3} {seconds:6.1f} s  reward {float(logs['reward']):.3f}"
            print(told, flush=True)


def train(fleet: Fleet, job: Job, folder: Path) -> list[Point]:
    """Train from the initial weights; checkpoints go into `folder`."""
    curve = Curve(job.prompts_per_step * job.samples)
    scheduler = RolloutScheduler.from_toml(
        POLICY, fleet.urls, prompts_per_step=job.prompts_per_step, version=fleet.version
    )
    with scheduler.blocking() as rollouts:
        weights = CheckpointTransfer(rollouts, folder / "weights")
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(fleet.model),
            processing_class=AutoTokenizer.from_pretrained(fleet.model),
            reward_funcs=reward,
            args=config(job, folder),
            train_dataset=prompts(job),
            callbacks=[curve],
            rollout_func=RolloutFunc(rollouts, weights=weights),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return curve.points


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 on success, 2 if it cannot run."""
    parser = argparse.ArgumentParser(prog="grpo_trl", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=Job().steps, metavar="N", help="default: %(default)s"
    )
    job = Job(steps=parser.parse_args(arguments).steps)
    try:
        with tempfile.TemporaryDirectory() as folder, servers(Path(folder), instances=1) as fleet:
            print(table({"TRL": train(fleet, job, Path(folder))}))
    except RolloutError as error:
        print(f"grpo_trl: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
