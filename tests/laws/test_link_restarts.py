"""Laws of fronts whose scheduler restarts and whose links break, at any times.

Every client call ends once, with the same tokens as without faults, and with versions for all of
them; nothing is left behind anywhere. A trainer that submits again what a scheduler has forgotten
gets every group.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from itertools import cycle

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_sched.config import load_policy
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.link.front import FrontCalls
from rollout_sched.link.host import Hub
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.ports import InstanceClient
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.settings import RunOptions, Settings
from rollout_sched.live.trainer.samples import Prompt
from rollout_sched.simulators.fake_instance.instance import RealtimeInstance
from tests import virtual_loop
from tests.laws.test_links import SPEC, SPEED, delays, length_of, times, undisturbed
from tests.link.wires import Shared, Wire

SAMPLES, MAX_TOKENS = 2, 100
PATIENCE_S = 300
SETTINGS = Settings(poll_s=2.0, stream_s=0.3, abort_timeout_s=5.0, resume_paused=True)
EXAMPLES = int(os.environ.get("LINK_EXAMPLES", "10"))

#: The prompts of callers differ from those of groups, which have one each.
CALLERS = 100


class Caller(TokenPayload):
    """A client that counts how often its call has ended."""

    def __init__(self, number: int) -> None:
        sampling = {"temperature": 0.0, "logprobs": 0}
        super().__init__([number + 1, 7, 9], sampling, stream_every=2, responder=self)
        self.ends: list[str] = []

    def answer(self, sample: DeliveredSample) -> None:
        assert sample.response_tokens == len(self.response_ids)
        assert sum(segment.tokens for segment in sample.segments) == sample.response_tokens
        self.ends.append("answered")

    def fail(self, reason: str, error: Exception | None) -> None:
        self.ends.append(reason)


class Instance(RealtimeInstance):
    """One server for several schedulers: none of them closes it."""

    async def close(self) -> None:
        pass


class World(msgspec.Struct):
    """The choices of Hypothesis. Times are in seconds.

    restarts  when the scheduler dies, and how long it is away
    breaks    when the link of which front breaks, and for how long
    calls     at which front, when, and after what time the call is withdrawn; 0: never
    """

    groups: int
    instances: int
    fronts: int
    delays: list[float]
    restarts: list[tuple[float, float]]
    breaks: list[tuple[int, float, float]]
    calls: list[tuple[int, float, float]]


class Joined:
    """A front's current connection; when it ends, frames in flight in both directions are lost."""

    def __init__(self, calls: FrontCalls, hub: Hub, name: str, delays: Iterator[float]) -> None:
        self.hub = hub
        self.over = False
        self._calls = calls
        self._name = name
        up, down = Wire(delays, self._heard), Wire(delays, self._told)
        calls.connect(hub.connect(name, down.send), up.send)

    def _heard(self, frame: bytes) -> None:
        if not self.over:
            self.hub.receive(self._name, frame)

    def _told(self, frame: bytes) -> None:
        if not self.over:
            self._calls.receive(frame)

    def end(self) -> None:
        if not self.over:
            self.over = True
            self._calls.disconnected()
            self.hub.disconnect(self._name)


class Run:
    def __init__(self, world: World) -> None:
        self.world = world
        self.instances: dict[str, InstanceClient] = {
            f"i{number}": Instance(f"i{number}", SPEC, length_of, speed=SPEED)
            for number in range(world.instances)
        }
        self.broken: list[Exception] = []
        shared = Shared(self.instances)
        self.fronts = [
            FrontCalls(f"f{number}", shared, self.broken.append) for number in range(world.fronts)
        ]
        self.delays = cycle(world.delays)
        self.joined: dict[int, Joined] = {}
        self.hub: Hub | None = None
        self.live: LiveScheduler | None = None
        self.callers: list[Caller] = []
        self.got: dict[str, list[list[int]]] = {}
        self.training: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        options = RunOptions(prompts_per_step=max(1, self.world.groups), stream_every=2)
        live = self.live = LiveScheduler(load_policy("partial_rollout"), options, settings=SETTINGS)
        self.hub = Hub(live)
        for client in self.instances.values():
            await live.driver.add_instance(client)
        for number in range(len(self.fronts)):
            self.join(number)
        self.training = asyncio.ensure_future(self.train(live))

    def join(self, number: int) -> None:
        hub = self.hub
        if hub is not None and (number not in self.joined or self.joined[number].over):
            self.joined[number] = Joined(self.fronts[number], hub, f"f{number}", self.delays)

    async def end(self) -> None:
        live, self.hub = self.live, None
        for joined in self.joined.values():
            joined.end()
        self.training.cancel()
        await live.close()

    async def train(self, live: LiveScheduler) -> None:
        """Train the groups that have not been delivered yet, in one batch."""
        missing = [n for n in range(self.world.groups) if f"g{n}" not in self.got]
        if not missing:
            return
        sampling = {"temperature": 0.0, "logprobs": 0}
        live.trainer.submit(
            Prompt(f"g{n}", [n + 1, 7, 9], SAMPLES, MAX_TOKENS, sampling) for n in missing
        )
        live.trainer.close_submissions()
        batch = await live.trainer.next_batch()
        assert not batch.failed
        for sample in batch.samples:
            self.got.setdefault(sample.uid, []).append(sample.response_ids)

    async def befall(self) -> None:
        await asyncio.gather(
            self.restart(),
            *(self.break_off(*times) for times in self.world.breaks),
            *(self.call(number, *call) for number, call in enumerate(self.world.calls)),
        )

    async def restart(self) -> None:
        for after_s, away_s in self.world.restarts:
            await asyncio.sleep(after_s)
            await self.end()
            await asyncio.sleep(away_s)
            await self.begin()

    async def break_off(self, front: int, at: float, away_s: float) -> None:
        number = front % len(self.fronts)
        await asyncio.sleep(at)
        if number in self.joined:
            self.joined[number].end()
        await asyncio.sleep(away_s)
        self.join(number)

    async def call(self, number: int, front: int, at: float, patience_s: float) -> None:
        await asyncio.sleep(at)
        calls = self.fronts[front % len(self.fronts)]
        caller = Caller(CALLERS + number)
        self.callers.append(caller)
        request = calls.submit(caller, 3, MAX_TOKENS)
        if patience_s:
            await asyncio.sleep(patience_s)
            calls.withdraw(request)

    async def play(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.begin()
            await self.befall()
            assert self.training is not None
            assert self.live is not None
            await self.training
            while any(not caller.ends for caller in self.callers):
                await asyncio.sleep(1)
            await asyncio.sleep(20)  # until all frames in flight have arrived
        await self.check_end(self.live)
        for front in self.fronts:
            await front.close()
        await self.live.close()

    async def check_end(self, live: LiveScheduler) -> None:
        wanted = await undisturbed(CALLERS + len(self.callers))
        assert not self.broken
        assert live.driver.broken is None
        assert not live.driver.view.anomalies
        for caller in self.callers:
            assert len(caller.ends) == 1
            assert caller.ends != ["failed"]
            if caller.ends == ["answered"]:
                number = caller.prompt_ids[0] - 1
                assert caller.response_ids == wanted[f"g{number}"]
                assert caller.logprobs is not None
                assert len(caller.logprobs) == len(caller.response_ids)
        assert self.got == {
            f"g{number}": [wanted[f"g{number}"]] * SAMPLES for number in range(self.world.groups)
        }
        assert not live.driver.view.in_flight
        assert not len(live.driver.front.payloads)
        for front in self.fronts:
            assert not len(front)
            assert front.refused == 0
            remote = front._remote
            assert not len(remote.calls)
            assert not len(remote.front.attempts)
            assert not len(remote.front.payloads)
        for instance in self.instances.values():
            assert (await instance.gauges()).running == 0


@st.composite
def worlds(draw: st.DrawFn) -> World:
    return World(
        draw(st.integers(0, 4)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.lists(delays, min_size=1, max_size=7)),
        draw(st.lists(st.tuples(times, st.floats(0, 3)), max_size=3)),
        draw(st.lists(st.tuples(st.integers(0, 2), times, st.floats(0, 3)), max_size=3)),
        draw(st.lists(st.tuples(st.integers(0, 2), times, st.just(0.0) | times), max_size=6)),
    )


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(world=worlds())
def test_scheduler_restart_at_any_time_loses_nothing(world: World) -> None:
    async def play() -> None:
        await Run(world).play()

    virtual_loop.run(play())
