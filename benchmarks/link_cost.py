"""The cost of a request and of a poll on a host: `python benchmarks/link_cost.py`.

1. Four fronts before one scheduler, without engines: each order is answered in the next frame. Only
   the host's CPU counts: frames read, events handled, orders written; the fronts' work does not.
   Five messages per request: submitted, dispatched, streamed once, finished, answered. Target:
   20,000 decisions a second, that is, events with everything that follows from them.
2. A poll of an instance's gauges, which the host makes every second (`poll_s`), by HTTP from a
   server in another process.

Exit code 1 if the target is missed.
"""

from __future__ import annotations

import asyncio
import sys
import time

from rollout_sched.config import load_policy
from rollout_sched.core.model.actions import Answer, Dispatch
from rollout_sched.core.model.events import RequestFinished, RequestSubmitted, TokensArrived
from rollout_sched.integrations.vllm import HttpInstance
from rollout_sched.link.connected_front import ConnectedFront
from rollout_sched.link.host import Host
from rollout_sched.link.protocol import Report, Reports, encode, read_orders
from rollout_sched.live import Driver, Settings
from rollout_sched.live.ports import Description, Gauges

FRONTS, INSTANCES, SLOTS = 4, 1024, 64
OPEN = 4096  # requests in flight
REQUESTS = 20_000
EVENTS = 3  # per request
POLLS = 1000
TARGET = 20_000


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


class Stub:
    """A front that answers every order at once, and sends a new request for each answer."""

    def __init__(self, host: Host, name: str) -> None:
        self.spent_s = 0.0
        self.answered = 0
        self.asked = 0
        self.name = name
        self.over = False
        self._epoch = host.epoch
        self._said = 0
        self._reports: list[Report] = []
        self._front: ConnectedFront = host.connect(name, self._take)

    def ask(self) -> None:
        self.asked += 1
        request = f"run.{self.name}.{self.asked}"
        self._reports.append(RequestSubmitted(request, request, 200, 4096))

    def _take(self, frame: bytes) -> None:
        if self.over:
            return
        began = time.process_time()
        for order in read_orders(frame).orders:
            if isinstance(order, Dispatch):
                self._reports.append(TokensArrived(order.request, order.attempt, 64))
                self._reports.append(RequestFinished(order.request, order.attempt, 100))
            elif isinstance(order, Answer):
                self.answered += 1
                self.ask()
        self.spent_s += time.process_time() - began
        asyncio.get_running_loop().call_soon(self.say)

    def say(self) -> None:
        began = time.process_time()
        reports, self._reports = self._reports, []
        self._said += 1
        frame = encode(Reports(self._epoch, self._said, reports))
        self.spent_s += time.process_time() - began
        self._front.receive(frame)


async def requests() -> float:
    """Microseconds of the host's CPU per request."""
    driver = Driver(load_policy("dplb").scheduler(1), settings=Settings(poll_s=1000.0))
    host = Host(driver)
    for number in range(INSTANCES):
        await driver.add_instance(Silent(f"i{number}"))  # type: ignore[arg-type]
    stubs = [Stub(host, f"f{number}") for number in range(FRONTS)]
    for number in range(OPEN):
        stubs[number % FRONTS].ask()
    began = time.process_time()
    for stub in stubs:
        stub.say()
    while sum(stub.answered for stub in stubs) < REQUESTS:
        await asyncio.sleep(0)
    spent = time.process_time() - began - sum(stub.spent_s for stub in stubs)
    answered = sum(stub.answered for stub in stubs)
    for stub in stubs:
        stub.over = True
    await driver.close()
    return spent / answered * 1e6


async def polls() -> float:
    """Microseconds of our CPU per poll."""
    command = (sys.executable, "-m", "rollout_sched", "fake-instance", "--port", "0")
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert server.stdout is not None
        url = ""
        while not url:
            words = (await server.stdout.readline()).decode().split()
            url = next((word for word in words if word.startswith("http://")), "")
        instance = HttpInstance(url.rstrip(",.;"))
        await instance.describe()
        began = time.process_time()
        for _ in range(POLLS):
            await instance.gauges()
        spent = time.process_time() - began
        await instance.close()
        return spent / POLLS * 1e6
    finally:
        server.terminate()
        await server.wait()


def main() -> int:
    request_us, poll_us = asyncio.run(requests()), asyncio.run(polls())
    rate = EVENTS / request_us * 1e6
    print(f"host CPU per request, {FRONTS} fronts, {INSTANCES:,} instances: {request_us:.0f} us")
    print(f"decisions a second: {rate:,.0f}, target {TARGET:,}")
    print(f"a poll: {poll_us:.0f} us")
    return int(rate < TARGET)


if __name__ == "__main__":
    sys.exit(main())
