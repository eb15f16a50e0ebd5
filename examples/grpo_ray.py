"""GRPO on a tiny model on Ray: the trainer, the scheduler with its fronts and two real vLLM servers
are actors of one cluster.

    make example-ray        # or: python -m examples.grpo_ray --steps 24

Model, job, reward and trainer are those of `grpo_tiny`. The scheduler finds the servers by their
actors' names. Groups go to the front, tokens to the scheduler, batches to the trainer's actor.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import ray

from examples.grpo_tiny import Job, train_by
from examples.learning_curves import Point, table
from examples.tiny_servers import FLAGS, MODEL, Fleet
from rollout_sched.core.errors import RolloutError
from rollout_sched.integrations.ray import on_ray

POLICY = Path(__file__).with_suffix(".toml")
SERVERS = 2


@ray.remote(num_cpus=0)
class Server:
    """A vLLM server of a model, on its own core."""

    def __init__(self, model: Path, folder: Path, core: int) -> None:
        from tests.vllm.servers import serving

        self._running = ExitStack()
        server = self._running.enter_context(
            serving(model, folder, *FLAGS, dev_mode=True, core=core)
        )
        self._url = server.wait()

    def url(self) -> str:
        """The URL for the scheduler."""
        return self._url

    def stop(self) -> None:
        self._running.close()


@ray.remote(num_cpus=0)
class Trainer:
    """Trains with the scheduler of the cluster, which it starts."""

    def train(self, model: Path, job: Job, folder: Path) -> list[Point]:
        scheduler = on_ray(
            POLICY,
            allow_code=True,  # its rewards are a function of this example
            servers="vllm-*",
            fronts=1,
            prompts_per_step=job.prompts_per_step,
        )
        fleet = Fleet((), model)
        return train_by(scheduler, POLICY.stem, fleet, job, folder)


def run(job: Job) -> list[Point]:
    """The rewards of the job's steps."""
    from tests.vllm import tiny_model

    ray.init("local", num_cpus=2, include_dashboard=False)
    servers = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "tiny"
        tiny_model.main([str(model), *MODEL])
        try:
            for core in range(SERVERS):
                actor = Server.options(name=f"vllm-{core}")
                servers.append(actor.remote(model, folder, core))
            ray.get([server.url.remote() for server in servers])
            trainer = Trainer.remote()
            points: list[Point] = ray.get(trainer.train.remote(model, job, folder / "checkpoints"))
        finally:
            ray.wait([server.stop.remote() for server in servers], num_returns=len(servers))
            ray.shutdown()
    return points


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 on success, 2 if it cannot run."""
    parser = argparse.ArgumentParser(prog="grpo_ray", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=Job().steps, metavar="N", help="default: %(default)s"
    )
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # one per file and step
    try:
        print(table({POLICY.stem: run(Job(steps=parser.parse_args(arguments).steps))}))
    except RolloutError as error:
        print(f"grpo_ray: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
