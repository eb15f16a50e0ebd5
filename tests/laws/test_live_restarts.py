"""Laws of a live run that is killed again and again, with simulated instances.

For every policy and at any time, although the trainer submits everything again after each kill:
every prompt comes in exactly one batch, complete and in time; a batch that was not acknowledged
comes again unchanged, with its rewards; greedy responses are the same as without the kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rollout_sched.config import PolicyFile, load_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.ports import Order
from rollout_sched.live.settings import RunOptions, Settings
from rollout_sched.live.trainer.delivery import LeaseEnded
from rollout_sched.live.trainer.samples import Batch, Prompt, Sample
from rollout_sched.simulators.fake_instance.answers import OrderedResponse
from rollout_sched.simulators.fake_instance.instance import RealtimeInstance
from rollout_sched.simulators.replay.runs import staleness_bound
from rollout_sched.simulators.replay.scenario import load_scenario

SPEC = load_scenario("tiny-cpu-2").instance
STEP, STEPS, SAMPLES = 3, 5, 2
MAX_TOKENS = 100
LEASE_S = 0.05

T = TypeVar("T")

Keep = Callable[[Sequence[Sample]], Awaitable[bool]]

#: Timeout in seconds, far longer than anything here.
PATIENCE_S = 300

PROMPTS = [
    Prompt(f"p{n}", [n + 1, 7, 9], SAMPLES, MAX_TOKENS, {"temperature": 0.0, "logprobs": 0})
    for n in range(STEP * STEPS)
]

POLICIES = [
    *map(load_policy, ("round_robin_sync", "areal", "partial_rollout", "april", "best_async"))
]


def length_of(order: Order, response: OrderedResponse) -> int:
    """One response in five reaches the limit."""
    return 10 + response.name % (MAX_TOKENS + 15)


class Life:
    """One process of a run, killed after a number of events. `version`: of the weights that its
    instances have; `keep`: which groups are trained."""

    def __init__(
        self,
        policy: PolicyFile,
        folder: Path,
        events: float,
        version: int,
        *,
        keep: Keep | None = None,
        lease_s: float = 0.0,
    ) -> None:
        self.over = asyncio.Event()
        self._events = events
        self._dead = False
        options = RunOptions(store=folder, prompts_per_step=STEP, stream_every=2)
        settings = Settings(poll_s=0.05, stream_s=0.01, lease_s=lease_s)
        self.live = LiveScheduler(policy, options, settings=settings, reward=worth, keep=keep)
        self.live.driver.pump.observers.append(self._count)
        self.live.driver.restore_weights(load)
        self.instances = [
            RealtimeInstance(
                name,
                SPEC,
                length_of,
                version=version,
                speed=2.0,
            )
            for name in ("i0", "i1")
        ]

    async def __aenter__(self) -> Life:
        for instance in self.instances:
            await self.live.driver.add_instance(instance)
        return self

    async def __aexit__(self, *error: object) -> None:
        await (self.live.driver if self._dead else self.live).close()

    def _count(self, now: float, event: Any, actions: Any) -> None:
        self._events -= 1
        if self._events < 0:
            self.over.set()

    def die(self) -> None:
        """From now on nothing is written; unwritten data is lost."""
        self._dead = True
        self.live.records.stored.keeper.writer.close()


async def worth(sample: Sample) -> dict[str, float]:
    """A reward that takes a moment, in which a process may be killed."""
    await asyncio.sleep(0.001 * (sample.response_ids[0] % 40))
    return {"first": sample.response_ids[0], "length": len(sample.response_ids)}


async def two_in_three(samples: Sequence[Sample]) -> bool:
    """Whether a group is trained."""
    await asyncio.sleep(0.005)
    for sample in samples:
        assert sample.rewards == await worth(sample)
    return int(samples[0].uid[1:]) % 3 > 0


async def load(client: Any, version: int) -> None:
    """A load takes no time; then the version changes."""


class Trainer:
    """Trains what it receives, publishes after each batch, and stores what it has acknowledged."""

    def __init__(self, bound: int | None) -> None:
        self.batches: dict[int, Batch] = {}
        self.acknowledged: int | None = None
        self.filtered: set[str] = set()
        self._bound = bound

    async def train(self, live: LiveScheduler) -> None:
        live.trainer.submit(PROMPTS)
        live.trainer.close_submissions()
        while (batch := await live.trainer.next_batch(self.acknowledged)) is not None:
            assert not batch.failed
            self.filtered.update(batch.filtered)
            if not batch.samples:  # the end for this process: the next one may get more
                break
            assert self.batches.setdefault(batch.number, batch) == batch
            assert len(batch.groups()) + batch.missing == STEP
            assert not self._has(batch.number), "an acknowledged batch was delivered again"
            for sample in batch.samples:
                assert self._bound is None or sample.staleness <= self._bound
                assert sample.rewards == await worth(sample)
            if live.trainer.weights.newest <= batch.number:
                await live.trainer.weights.publish(batch.number + 1, load, encoded=b"at once")
            self.acknowledged = batch.number

    def _has(self, batch: int) -> bool:
        return self.acknowledged is not None and batch <= self.acknowledged


async def undisturbed() -> dict[str, list[int]]:
    one = RealtimeInstance("one", SPEC, length_of, speed=2.0)
    orders = [Order(p.uid, p.prompt_ids, MAX_TOKENS, "v0", p.sampling) for p in PROMPTS]
    outputs = await asyncio.gather(*map(one.generate, orders))
    return {order.id: output.token_ids for order, output in zip(orders, outputs, strict=True)}


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("seed", range(2))
def test_killed_again_and_again(policy: PolicyFile, seed: int, tmp_path: Path) -> None:
    async def scene() -> None:
        trainer = await trained(policy, seed, tmp_path)
        wanted = await undisturbed()
        for batch in trainer.batches.values():
            for sample in batch.samples:
                assert sample.response_ids == wanted[sample.uid]

    asyncio.run(bounded(scene()))


@pytest.mark.parametrize("policy", POLICIES[:2], ids=lambda policy: policy.name)
def test_filtered_groups_are_reported_and_replaced(policy: PolicyFile, tmp_path: Path) -> None:
    trainer = asyncio.run(bounded(trained(policy, 0, tmp_path, keep=two_in_three)))
    assert trainer.filtered == {f"p{number}" for number in range(0, len(PROMPTS), 3)}


async def trained(
    policy: PolicyFile, seed: int, folder: Path, *, keep: Keep | None = None
) -> Trainer:
    """Run with six kills; all kept prompts, each in exactly one batch."""
    rng, version = random.Random(f"{policy.name}/{seed}"), 0
    trainer = Trainer(staleness_bound(policy.scheduler(STEP).roles.freshness))
    for _ in range(6):
        events = rng.randrange(5, 150)
        async with Life(policy, folder, events, version, keep=keep) as one:
            training = asyncio.ensure_future(trainer.train(one.live))
            killed = asyncio.ensure_future(one.over.wait())
            await asyncio.wait({training, killed}, return_when=asyncio.FIRST_COMPLETED)
            one.die()
            if training.done():
                training.result()
            training.cancel()
            killed.cancel()
            version = rng.randint(0, one.live.trainer.weights.newest)
    forever = float("inf")
    async with Life(policy, folder, forever, version, keep=keep) as last:
        await trainer.train(last.live)
    came = Counter((s.uid, s.index) for b in trainer.batches.values() for s in b.samples)
    assert max(came.values()) == 1
    kept = [prompt.uid for prompt in PROMPTS if prompt.uid not in trainer.filtered]
    assert Counter(uid for uid, _ in came) == dict.fromkeys(kept, SAMPLES)
    return trainer


class Book:
    """The shared knowledge of the trainers of one run."""

    def __init__(self) -> None:
        self.batches: dict[int, Batch] = {}
        self.acknowledged: dict[int, str] = {}
        self.submitted = False
        self.refused = 0


class OneOfSeveral:
    """A trainer that dies between a delivery and its acknowledgement and returns under its name, or
    is too slow for its lease."""

    def __init__(self, name: str, book: Book, rng: random.Random) -> None:
        self._name = name
        self._book = book
        self._rng = rng
        self._received: int | None = None

    async def train(self, live: LiveScheduler) -> None:
        book = self._book
        while True:
            number = self._received
            try:
                batch = await live.trainer.next_batch(number, trainer=self._name)
            except LeaseEnded:
                assert number is not None
                book.refused += 1
                self._received = None
                continue
            if number is not None:
                assert book.acknowledged.setdefault(number, self._name) == self._name
            if batch is None:
                return
            assert batch.number not in book.acknowledged, "an acknowledged batch came again"
            assert book.batches.setdefault(batch.number, batch) == batch
            await self._work(live, batch)

    async def _work(self, live: LiveScheduler, batch: Batch) -> None:
        befalls = self._rng.random()
        if befalls < 0.2:
            self._received = None  # its checkpoint is older
            return
        await asyncio.sleep(3 * LEASE_S if befalls < 0.4 else 0.0)
        self._received = batch.number
        with contextlib.suppress(CallerError):  # the other trainer was faster
            await live.trainer.weights.publish(
                live.trainer.weights.newest + 1, load, encoded=b"at once"
            )


@pytest.mark.parametrize("policy", ["round_robin_sync", "areal"])
@pytest.mark.parametrize("seed", range(2))
def test_two_trainers_share_a_run_that_is_killed(policy: str, seed: int, tmp_path: Path) -> None:
    """Every prompt is acknowledged once, by one of the trainers."""

    async def scene() -> None:
        rng, book = random.Random(f"{policy}/{seed}/two"), Book()
        pair = [OneOfSeveral(name, book, rng) for name in ("t1", "t2")]
        for life in range(6):
            events = rng.randrange(20, 200) if life < 5 else float("inf")
            await live_once(load_policy(policy), tmp_path, events, book, pair)
        trained = Counter(uid for n in book.acknowledged for uid in book.batches[n].groups())
        assert trained == {prompt.uid: 1 for prompt in PROMPTS}

    asyncio.run(bounded(scene()))


async def live_once(
    policy: PolicyFile, folder: Path, events: float, book: Book, pair: list[OneOfSeveral]
) -> None:
    async with Life(policy, folder, events, 0, lease_s=LEASE_S) as one:
        training = asyncio.gather(*(trainer.train(one.live) for trainer in pair))
        killed = asyncio.ensure_future(one.over.wait())
        if not book.submitted:
            one.live.trainer.submit(PROMPTS)
            one.live.trainer.close_submissions()
            await one.live.trainer.durable()
            book.submitted = True
        await asyncio.wait({training, killed}, return_when=asyncio.FIRST_COMPLETED)
        one.die()
        if training.done():
            training.result()
        training.cancel()
        killed.cancel()
        await asyncio.gather(training, return_exceptions=True)


async def bounded(scene: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(PATIENCE_S):
        return await scene
