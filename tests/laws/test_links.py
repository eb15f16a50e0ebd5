"""Laws of several fronts with one scheduler, for any delays of the links between them.

Every group comes in exactly one batch, complete, in time and with the counted tokens, although
fronts die meanwhile and instances are lost; every call ends once; nothing is left behind. Greedy
responses are the same as without faults.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_sched.config import parse_policy
from rollout_sched.core.model.actions import Action, Deliver
from rollout_sched.core.model.events import BatchRequested, Event, GroupSubmitted, SubmissionsClosed
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.inspection.trace_fold import TraceFold
from rollout_sched.link.host import Host
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import InstanceClient, Order
from rollout_sched.live.requests.payloads import PayloadFactory
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.settings import Settings
from rollout_sched.metrics.fold import Folded
from rollout_sched.simulators.fake_instance.answers import OrderedResponse
from rollout_sched.simulators.fake_instance.instance import RealtimeInstance
from rollout_sched.simulators.replay.runs import staleness_bound
from rollout_sched.simulators.replay.scenario import load_scenario
from tests import virtual_loop
from tests.laws.test_twins import PRESETS
from tests.link.wires import Joined

#: Few slots and a slow engine: a run takes some seconds, and requests are in flight in each second.
SPEC = msgspec.structs.replace(load_scenario("tiny-cpu-2").instance, max_num_seqs=4)
SPEED = 0.2
STEP, SAMPLES, MAX_TOKENS = 3, 2, 100

#: Timeout in virtual seconds, far longer than any run.
PATIENCE_S = 10_000
SETTINGS = Settings(poll_s=2.0, stream_s=0.3)

#: Examples for each policy; more on request.
EXAMPLES = int(os.environ.get("LINK_EXAMPLES", "5"))

POLICIES = (
    "sync",
    "tail_batching",
    "partial_rollout",
    "segments",
    "async_in_place",
    "async_resubmit",
    "async_in_parts",
    "async_migration",
)


def length_of(order: Order, response: OrderedResponse) -> int:
    """One response in five reaches the limit."""
    return 10 + response.name % (MAX_TOKENS + 15)


class Caller(TokenPayload):
    """A client that counts how often its call has ended."""

    def __init__(self, number: int) -> None:
        sampling = {"temperature": 0.0, "logprobs": 0}
        super().__init__([number + 1, 5], sampling, stream_every=2, responder=self)
        self.ends: list[str] = []

    def answer(self, sample: DeliveredSample) -> None:
        assert sample.response_tokens == len(self.response_ids)
        self.ends.append("answered")

    def fail(self, reason: str, error: Exception | None) -> None:
        self.ends.append(reason)


class World(msgspec.Struct):
    """The choices of Hypothesis. Times are in seconds; fronts and instances are numbers."""

    policy: str
    groups: int
    instances: int
    fronts: int
    delays: list[float]
    deaths: dict[int, float]
    losses: dict[int, tuple[float, float]]
    calls: list[
        tuple[int, float, float]
    ]  # at which front, when, and after what time it is withdrawn


class Run:
    """One training with a host and several fronts."""

    def __init__(self, world: World) -> None:
        self.world = world
        policy = parse_policy(world.policy, PRESETS[world.policy])
        self.scheduler, self.again = policy.scheduler(STEP), policy.scheduler(STEP)
        self.journal: list[tuple[float, Event, list[Action]]] = []
        self.bound = staleness_bound(self.scheduler.roles.freshness)
        self.batches: asyncio.Queue[tuple[Deliver, list[Any]]] = asyncio.Queue()
        self.failed: list[str] = []
        self.driver = Driver(
            self.scheduler,
            settings=SETTINGS,
            run_id="run",
            observers=[lambda *entry: self.journal.append(entry)],
            on_deliver=lambda action, payloads: self.batches.put_nowait((action, payloads)),
            on_group_failed=lambda group, error: self.failed.append(f"{group}: {error}"),
        )
        self.host = Host(self.driver)
        self.instances: dict[str, InstanceClient] = {}
        delays: Iterator[float] = cycle(world.delays)
        self.fronts = [
            Joined(
                self.host,
                f"f{number}",
                delays,
                instances=self.instances,
                make=self.factory,
                settings=SETTINGS,
            )
            for number in range(world.fronts)
        ]
        self.callers: list[tuple[Joined, Caller]] = []
        self.came: Counter[tuple[str, int]] = Counter()
        self.made: dict[str, int] = {}

    def factory(self, spec: bytes) -> PayloadFactory:
        """The payload factory of a group, by the number in its recipe."""
        prompt = prompt_of(int(spec))
        sampling = {"temperature": 0.0, "logprobs": 0}
        return lambda index: TokenPayload(prompt, sampling, stream_every=2)

    async def add(self, name: str) -> None:
        self.instances[name] = RealtimeInstance(name, SPEC, length_of, speed=SPEED)
        await self.driver.add_instance(self.instances[name])

    async def train(self) -> None:
        for number in range(self.world.groups):
            submitted = GroupSubmitted(
                f"g{number}", SAMPLES, len(prompt_of(number)), MAX_TOKENS, f"p{number}"
            )
            spec = b"%d" % number
            self.host.submit_group(submitted, self.factory(spec), spec)
        self.driver.tell(SubmissionsClosed())
        wanted = await undisturbed(self.world.groups)
        trained = 0
        while trained < self.world.groups:
            self.driver.tell(BatchRequested(parts=True))
            last = False
            while not last:
                action, payloads = await self.batches.get()
                for sample, payload in zip(action.samples, payloads, strict=True):
                    self.check(sample, payload, wanted)
                trained += len({sample.group for sample in action.samples})
                last = action.last
            await asyncio.sleep(0.5)
            self.driver.publish(self.driver.view.run.version + 1, load)

    def check(
        self, sample: DeliveredSample, payload: TokenPayload, wanted: dict[str, list[int]]
    ) -> None:
        self.came[sample.group, sample.index] += 1
        self.made[sample.group] = sample.response_tokens
        assert payload.response_ids == wanted[sample.group]
        assert len(payload.response_ids) == sample.response_tokens
        logprobs = payload.logprobs
        assert logprobs is not None
        assert len(logprobs) == sample.response_tokens
        assert self.bound is None or sample.staleness <= self.bound

    async def befall(self) -> None:
        """Run the deaths, losses and calls at their times."""
        await asyncio.gather(
            *(self.kill(number, at) for number, at in self.world.deaths.items()),
            *(self.lose(number, *times) for number, times in self.world.losses.items()),
            *(self.call(number, *call) for number, call in enumerate(self.world.calls)),
        )

    async def kill(self, number: int, at: float) -> None:
        await asyncio.sleep(at)
        await self.fronts[number % len(self.fronts)].die()

    async def lose(self, number: int, at: float, back_s: float) -> None:
        await asyncio.sleep(at)
        name = f"i{number % self.world.instances}"
        await self.driver.remove_instance(name)
        await asyncio.sleep(back_s)
        await self.add(name)

    async def call(self, number: int, front: int, at: float, patience_s: float) -> None:
        await asyncio.sleep(at)
        joined = self.fronts[front % len(self.fronts)]
        if joined.dead:
            return
        caller = Caller(number)
        self.callers.append((joined, caller))
        request = joined.remote.calls.submit(caller, 2, MAX_TOKENS)
        await asyncio.sleep(patience_s)
        if not joined.dead:
            joined.remote.calls.withdraw(request)

    async def live(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            for number in range(self.world.instances):
                await self.add(f"i{number}")
            befalling = asyncio.ensure_future(self.befall())
            await self.train()
            await befalling
            await asyncio.sleep(20)  # until all frames in flight have arrived
        self.check_end()
        for joined in self.fronts:
            await joined.remote.close()
        await self.driver.close()

    def check_end(self) -> None:
        assert not self.failed
        assert max(self.came.values()) == 1
        groups = Counter(group for group, _ in self.came)
        assert groups == {f"g{number}": SAMPLES for number in range(self.world.groups)}
        self.scheduler.check_invariants()
        for now, event, actions in self.journal:
            assert self.again.handle(event, now) == actions, "the journal differs"
        self.check_trace()
        assert self.driver.broken is None
        assert not self.scheduler.state.fleet.attempts
        assert not self.scheduler.state.anomalies
        books = [self.driver.front, *(j.remote.front for j in self.fronts if not j.dead)]
        for front in books:
            assert not len(front.payloads)
            assert not len(front.attempts)
        for joined in self.fronts:
            assert not joined.broken
            assert not len(joined.connected.attempts)
            assert not joined.connected.groups or joined.dead
        assert not self.host.owned
        for joined, caller in self.callers:
            assert len(caller.ends) == 1 or (joined.dead and not caller.ends)

    def check_trace(self) -> None:
        """Whichever fronts had a group, it is in the trace once, and whole."""
        fold = TraceFold("journal", [])
        observe = Folded(fold).observe
        for entry in self.journal:
            observe(*entry)
        trace, _ = fold.trace("run", STEP)
        assert list(trace.groups) == [f"g{number}" for number in range(self.world.groups)]
        for group, samples in trace.groups.items():
            made = [s.response_tokens for s in samples if s.finish != "cut"]
            assert set(made) == {self.made[group]}
            assert len(made) >= SAMPLES, "the surplus may be those that came first"


def prompt_of(number: int) -> list[int]:
    return [number + 1, 7, 9]


async def undisturbed(groups: int) -> dict[str, list[int]]:
    one = RealtimeInstance("one", SPEC, length_of, speed=SPEED)
    orders = [
        Order(f"g{number}", prompt_of(number), MAX_TOKENS, "v0", {"temperature": 0.0})
        for number in range(groups)
    ]
    outputs = await asyncio.gather(*map(one.generate, orders))
    return {order.id: output.token_ids for order, output in zip(orders, outputs, strict=True)}


async def load(client: Any, version: int) -> None:
    """A load takes a moment; then the version changes."""
    await asyncio.sleep(0.05)


async def run(world: World) -> None:
    await Run(world).live()


times = st.integers(1, 600).map(lambda n: n * 0.01271828)
delays = st.sampled_from([0.0, 0.001, 0.01, 0.1, 1.0]) | st.floats(0, 0.5)


@st.composite
def worlds(draw: st.DrawFn, policy: str) -> World:
    fronts = draw(st.integers(1, 3))
    instances = draw(st.integers(1, 3))
    return World(
        policy,
        draw(st.integers(1, 8)),
        instances,
        fronts,
        draw(st.lists(delays, min_size=1, max_size=7)),
        draw(st.dictionaries(st.integers(0, fronts - 1), times, max_size=2)),
        draw(st.dictionaries(st.integers(0, instances - 1), st.tuples(times, times), max_size=2)),
        draw(st.lists(st.tuples(st.integers(0, 2), times, times), max_size=6)),
    )


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_delayed_links_lose_nothing(policy: str, data: st.DataObject) -> None:
    virtual_loop.run(run(data.draw(worlds(policy))))
