"""Two trainers for the same job: one in lock step through a router, one with our batches.

Training is a sleep as long as the scenario's trainer takes. New weights are a `reload_weights` call
to every instance, which takes as long as the scenario's transfer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmarks.live.closed_client import send_all
from benchmarks.live.delivery_book import DeliveryBook
from benchmarks.live.processes import url
from benchmarks.live.simulated_fleet import MODEL
from benchmarks.live.steps_job import StepsJob, tokens_of
from rollout_sched.client import Batch, Reload, RolloutScheduler

#: Any folder that the instances see: they check that it exists and read nothing.
WEIGHTS = "/"


@dataclass
class Trained:
    """One trained job. Seconds are simulated.

    total_s: from the first prompt to the end of the last training step. steps_s: from one batch to
    the next. ages: staleness of every sample. version: the newest published one.
    """

    total_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    samples: int = 0
    version: int = 0
    failures: list[str] = field(default_factory=list)


class Stopwatch:
    """Simulated seconds since it was made."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._start = time.monotonic()

    def read(self) -> float:
        return (time.monotonic() - self._start) * self._speed

    async def sleep(self, simulated_s: float) -> None:
        await asyncio.sleep(simulated_s / self._speed)


async def train_in_lock_step(
    job: StepsJob, routers: Sequence[int], instances: Sequence[int], nonce: str
) -> Trained:
    """Send a step's requests to the routers, wait for all, train, load the weights, repeat."""
    trained, last = Trained(), 0.0
    groups = list(job.trace.groups.values())
    steps = list(job.steps(nonce, MODEL))
    watch = Stopwatch(job.speed)
    for number, step in enumerate(steps):
        if number:
            trained.failures += await load_weights(instances)
        finished = await send_all(step, [url(port) for port in routers])
        now = watch.read()
        trained.steps_s.append(now - last)
        last = now
        trained.samples += len(finished.at_s)
        trained.failures += finished.failures
        first = number * job.prompts_per_step
        batch = groups[first : first + job.prompts_per_step]
        await watch.sleep(job.training_s(tokens_of(s for members in batch for s in members)))
    trained.total_s = watch.read()
    trained.ages = [0] * trained.samples
    return trained


async def load_weights(instances: Sequence[int]) -> list[str]:
    """Load into all instances at once; returns the errors."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": WEIGHTS}}

    async def load(session: aiohttp.ClientSession, port: int) -> str:
        async with session.post(url(port, "/collective_rpc"), json=body) as answer:
            text = await answer.text()
            return "" if answer.status == 200 else f"weights: {answer.status} {text[:200]}"

    async with aiohttp.ClientSession() as session:
        told = await asyncio.gather(*(load(session, port) for port in instances))
    return [failure for failure in told if failure]


async def train_on_batches(job: StepsJob, gateway: int, instances: int, nonce: str) -> Trained:
    """Submit every prompt, then train batch by batch, in parts if the replay's trainer does so, and
    publish a version after each."""
    trained, last = Trained(), 0.0
    async with RolloutScheduler.connect(url(gateway)) as rollouts:
        while (await rollouts.state())["joined"] < instances:
            await asyncio.sleep(0.1)
        prompts = list(job.prompts(nonce))
        book = DeliveryBook(prompts)
        watch = Stopwatch(job.speed)
        await rollouts.submit(prompts)
        await rollouts.close_submissions()
        parts = not job.scenario.trainer.colocated
        while book.outstanding and (part := await rollouts.next_batch(parts=parts)) is not None:
            if part.last:
                now = watch.read()
                trained.steps_s.append(now - last)
                last = now
            book.enter(part)
            trained.ages += [sample.staleness for sample in part.samples]
            await watch.sleep(job.training_s(_tokens(part), last=part.last))
            if part.last and book.outstanding:
                trained.version = part.version + 1
                await rollouts.publish_weights(trained.version, Reload(WEIGHTS, visible_here=False))
        trained.total_s = watch.read()
    trained.samples = len(trained.ages)
    trained.failures = book.failures
    return trained


def _tokens(batch: Batch) -> int:
    return sum(len(one.prompt_ids) + len(one.response_ids) for one in batch.samples)
