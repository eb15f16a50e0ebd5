"""GRPO on a tiny model, with a real vLLM server on the CPU.

    make example        # or: python -m examples.grpo_tiny --steps 24 --svg curves.svg

The model is tiny and random; its reward is the share of its response tokens that are in a target
set. The same training runs under a synchronous, a partial and an asynchronous policy. After every
step the server loads the new weights, and tokens of older weights are weighted according to their
versions. For each policy the rewards are shown over wall time and over samples.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from examples.learning_curves import Curves, Point, svg, table
from examples.tiny_servers import VOCABULARY, Fleet, check_real, servers
from rollout_sched import Batch, Prompt, Reload, RolloutScheduler, Sample
from rollout_sched.core.errors import CallerError, RolloutError

if TYPE_CHECKING:
    from examples.grpo import StepFigures

POLICIES = ("round_robin_sync", "april", "areal")
#: Every fourth token is wanted: a quarter of the tokens of an untrained model.
WANTED = frozenset(range(0, VOCABULARY, 4))
#: These tokens end a response, so lengths vary as in real training.
STOP = list(range(301, 309))


class Job(msgspec.Struct, frozen=True):
    """steps to train; prompts per step and samples per prompt; responses of at most max_tokens."""

    steps: int = 24
    prompts_per_step: int = 16
    samples: int = 8
    max_tokens: int = 64
    seed: int = 0


def share(token_ids: Sequence[int]) -> float:
    """The share of wanted tokens, without the one that ended the response."""
    said = [token for token in token_ids if token not in STOP]
    return sum(token in WANTED for token in said) / len(said) if said else 0.0


async def reward(sample: Sample) -> float:
    return share(sample.response_ids)


def prompts(job: Job) -> list[Prompt]:
    rng = random.Random(job.seed)
    sampling = {"temperature": 1.0, "logprobs": 0, "stop_token_ids": STOP, "ignore_eos": True}
    return [
        Prompt(
            f"prompt-{number}",
            [rng.randrange(3, VOCABULARY) for _ in range(8)],
            job.samples,
            job.max_tokens,
            sampling,
        )
        for number in range(job.steps * job.prompts_per_step)
    ]


def train(policy: str, fleet: Fleet, job: Job, folder: Path) -> list[Point]:
    """One training from the initial weights under a policy; checkpoints go into `folder`."""
    scheduler = RolloutScheduler.from_toml(
        policy,
        fleet.urls,
        prompts_per_step=job.prompts_per_step,
        version=fleet.version,
        reward=reward,
    )
    return train_by(scheduler, policy, fleet, job, folder)


def train_by(
    scheduler: RolloutScheduler, policy: str, fleet: Fleet, job: Job, folder: Path
) -> list[Point]:
    """The same with a given scheduler, which computes rewards; its instances are the fleet's."""
    import torch

    from examples.grpo import Learner, Settings
    from rollout_sched.integrations.torch import Checkpoints

    torch.manual_seed(job.seed)
    learner, checkpoints = Learner(fleet.model, Settings()), Checkpoints(folder)
    points: list[Point] = []
    with scheduler.blocking() as rollouts:

        def publish(*, wait: bool = False) -> None:
            fleet.version += 1
            weights = Reload(str(checkpoints.write(fleet.version, learner.weights())))
            rollouts.publish_weights(fleet.version, weights, wait=wait)

        publish(wait=True)  # the initial weights: the last policy left others in the servers
        start = time.monotonic()
        rollouts.submit(prompts(job))
        rollouts.close_submissions()
        for batch in rollouts.batches():
            if batch.failed:
                lost = batch.failed[0]
                raise CallerError(f"{policy}: {lost.uid} failed: {lost.reason}")
            figures = learner.step(batch)
            publish()
            points.append(point_of(batch, points, time.monotonic() - start))
            say(policy, points, figures, batch)
        publish(wait=True)  # so that the next training finds the servers at the published version
    return points


def point_of(batch: Batch, before: Sequence[Point], seconds: float) -> Point:
    rewards = [sample.reward for sample in batch.samples]
    samples = len(rewards) + (before[-1].samples if before else 0)
    return Point(seconds, samples, sum(rewards) / len(rewards))


def say(policy: str, points: Sequence[Point], figures: StepFigures, batch: Batch) -> None:
    last = points[-1]
    staleness = sum(sample.staleness for sample in batch.samples) / len(batch.samples)
    print(
        f"{policy:18} step {len(points):3} {last.seconds:6.1f} s  reward {last.reward:.3f}  "
        f"staleness {staleness:.2f}, older tokens {figures.older:4.0%}, weight "
        f"{figures.weight:.2f} ({figures.truncated:.0%} truncated)",
        flush=True,
    )


def run(options: argparse.Namespace) -> None:
    job = Job(steps=options.steps)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.instances:
            if options.model is None:
                raise CallerError("--model is missing: give the folder of the model they serve")
            for url in options.instances:
                check_real(url, options.model)
            fleet = Fleet(options.instances, options.model)
        else:
            fleet = stack.enter_context(servers(folder, instances=1))
        curves: Curves = {}
        for policy in options.policies or POLICIES:
            checkpoints = folder / f"checkpoints-{len(curves)}"
            curves[policy] = train(policy, fleet, job, checkpoints)
    print(table(curves))
    if options.svg is not None:
        options.svg.write_text(svg(curves, "Mean reward of each training step"))
        print(f"drawn in {options.svg}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 on success, 2 if it cannot run."""
    parser = argparse.ArgumentParser(prog="grpo_tiny", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--steps", type=int, default=Job().steps, metavar="N", help="default: %(default)s")
    add("--policy", action="append", dest="policies", metavar="NAME_OR_TOML", help="repeatable")
    add("--svg", type=Path, metavar="FILE", help="draw the curves into FILE")
    add(
        "--instance",
        action="append",
        dest="instances",
        metavar="URL",
        help="URL of your vLLM server, repeatable; default: start one on the CPU",
    )
    add("--model", type=Path, metavar="FOLDER", help="with --instance: the model they serve")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # one per file and step
    try:
        run(parser.parse_args(arguments))
    except RolloutError as error:
        print(f"grpo_tiny: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
