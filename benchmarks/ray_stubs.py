"""A scheduler and fronts as actors, without clients, instances and gateway: only their messages.

`ray_link` and `verl_balancer` measure them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ray

from rollout_sched.config import load_policy
from rollout_sched.core.model.actions import Answer, Dispatch
from rollout_sched.core.model.events import RequestFinished, RequestSubmitted, TokensArrived
from rollout_sched.link import Hub, LinkDialler, LinkListener, SchedulerPlace
from rollout_sched.link.protocol import Report, Reports, encode, read_orders, read_welcome
from rollout_sched.live import LiveScheduler, Settings
from rollout_sched.live.ports import Description, Gauges

FRAME = 5000
INSTANCES, SLOTS = 256, 256
EVENTS = 3  # per request


class Silent:
    """An instance that is only supervised."""

    labelled = False

    def __init__(self, name: str) -> None:
        self.name = name

    async def describe(self) -> Description:
        return Description(SLOTS, 10**9, 10**6, version=0)

    async def gauges(self) -> Gauges:
        return Gauges(0, 0, 0.0)

    async def set_version(self, version: int) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


class Scheduler:
    """A live scheduler and its hub, without a gateway."""

    async def open(self) -> SchedulerPlace:
        live = LiveScheduler(load_policy("dplb"), settings=Settings(poll_s=1000.0))
        for number in range(INSTANCES):
            await live.driver.add_instance(Silent(f"i{number}"))  # type: ignore[arg-type]
        listener = LinkListener(Hub(live), "key")
        return SchedulerPlace("127.0.0.1", await listener.open("127.0.0.1"), "key")

    async def spent(self) -> float:
        """Seconds of CPU."""
        return time.process_time()

    async def take(self, frame: bytes) -> None:
        """A call that does nothing."""


class Load(NamedTuple):
    answered: int
    waits_s: list[float]  # from a request's submission to its order
    spent_s: float


class StubFront:
    """Submits requests, and answers orders after `hold_s`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._here = asyncio.Event()
        self._send: Callable[[bytes], None] = lambda frame: None
        self._epoch = ""
        self._reports: list[Report] = []
        self._told: dict[str, float] = {}
        self._waits: list[float] = []
        self._said = self._asked = self._answered = 0
        self._hold_s = 0.0
        self._goes_on = True
        self._dialler: LinkDialler

    async def open(self, place: SchedulerPlace) -> None:
        async def locate() -> SchedulerPlace:
            return place

        self._dialler = LinkDialler(self, self._name, locate)
        self._dialler.open()
        await self._here.wait()

    async def calls(self, actor: Any, count: int) -> float:
        """Seconds of CPU for `count` calls, one after the other."""
        began = time.process_time()
        for _ in range(count):
            await actor.take.remote(bytes(FRAME))
        return time.process_time() - began

    async def saturate(self, open_at_once: int, seconds: float) -> Load:
        began = time.process_time()
        for _ in range(open_at_once):
            self.ask()
        self.say()
        await asyncio.sleep(seconds)
        self._goes_on = False
        return Load(self._answered, self._waits, time.process_time() - began)

    async def pace(self, rate: float, hold_s: float, seconds: float) -> Load:
        self._hold_s, self._goes_on = hold_s, False
        loop = asyncio.get_running_loop()
        began, spent, asked = loop.time(), time.process_time(), 0
        while (now := loop.time()) < began + seconds:
            while asked < (now - began) * rate:
                asked += 1
                self.ask()
            self.say()
            await asyncio.sleep(0.001)
        spent = time.process_time() - spent
        await asyncio.sleep(hold_s)
        return Load(self._answered, self._waits, spent)

    def ask(self) -> None:
        self._asked += 1
        request = f"{self._name}.{self._asked}"
        self._told[request] = time.perf_counter()
        self._reports.append(RequestSubmitted(request, request, 200, 4096))

    def say(self) -> None:
        if self._reports:
            reports, self._reports = self._reports, []
            self._said += 1
            self._send(encode(Reports(self._epoch, self._said, reports)))

    # -- its scheduler (`dialler.LinkedFront`) ---------------------------------------------------

    def connect(self, welcome: bytes, send: Callable[[bytes], None]) -> None:
        self._epoch, self._send = read_welcome(welcome).epoch, send
        self._here.set()

    def receive(self, frame: bytes) -> None:
        for order in read_orders(frame).orders:
            if isinstance(order, Dispatch):
                self._waits.append(time.perf_counter() - self._told.pop(order.request))
                if self._hold_s:
                    asyncio.get_running_loop().call_later(self._hold_s, self._answer, order)
                else:
                    self._answer(order)
            elif isinstance(order, Answer):
                self._answered += 1
                if self._goes_on:
                    self.ask()
        if not self._hold_s:
            self.say()

    def disconnected(self) -> None: ...

    def _answer(self, order: Dispatch) -> None:
        self._reports.append(TokensArrived(order.request, order.attempt, 64))
        self._reports.append(RequestFinished(order.request, order.attempt, 100))


def stage(fronts: int) -> tuple[Any, list[Any]]:
    scheduler = ray.remote(Scheduler).options(num_cpus=0).remote()
    place = ray.get(scheduler.open.remote())
    made = [ray.remote(StubFront).options(num_cpus=0).remote(f"f{n}") for n in range(fronts)]
    ray.get([front.open.remote(place) for front in made])
    return scheduler, made


def leave(scheduler: Any, fronts: list[Any]) -> None:
    for actor in (scheduler, *fronts):
        ray.kill(actor)


def percentiles(loads: list[Load]) -> tuple[float, float]:
    """(p50, p99) of the waits, in milliseconds."""
    waits = sorted(wait for load in loads for wait in load.waits_s)
    return waits[len(waits) // 2] * 1e3, waits[len(waits) * 99 // 100] * 1e3
