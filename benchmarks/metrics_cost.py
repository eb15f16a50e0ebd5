"""The cost of metrics per request, and of a scrape: `python -m benchmarks.metrics_cost`.

Fronts send requests to a gateway's scheduler and answer at once, without engines (`link_cost.py`).
The scheduler's own CPU per request is measured. The arms differ in what is counted:

    nothing   nothing
    counted   the figures of `/metrics`, as `serve` counts them: plain sums, converted to
              prometheus_client's families at a scrape
    scraped   the same, with one scrape per second of CPU (Prometheus' default is 60 s)
    client    the part of it about clients' requests, counted by prometheus_client's own counters
              and histograms as it happens

Each repetition measures all of them, in another order. Figures are medians (min-max), and of the
differences to "nothing" within a repetition.

The rule: on 64 instances, a scrape per second makes a request at most 2 % more expensive than
counting alone, in the median. Exit code 1 if not. The time of one scrape is also shown for other
fleets.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

from prometheus_client import CollectorRegistry, Counter, Histogram

from benchmarks.link_cost import FRONTS, OPEN, Silent, Stub
from rollout_sched.core.model.actions import Answer, Dispatch
from rollout_sched.core.model.events import RequestSubmitted
from rollout_sched.integrations.gateway.control_plane.prometheus import GatewayMetrics
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.link.host import Host
from rollout_sched.live import Settings
from rollout_sched.metrics.fold import SECONDS, TOKENS, Folded

ARMS = ("nothing", "counted", "scraped", "client")
INSTANCES = 64
FLEETS = (8, 64, 1024)
MOST_SCRAPED = 1.02
SCRAPES = 20


class ByClient:
    """Requests of clients counted by prometheus_client: outcomes, tokens, attempts, waiting times
    and durations."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._outcomes = Counter("requests", "-", ["outcome"], registry=registry)
        self._made = Counter("tokens", "-", ["outcome"], registry=registry)
        self._attempts = Counter("attempts", "-", registry=registry)
        self._wait = Histogram("wait", "-", buckets=SECONDS, registry=registry)
        self._duration = Histogram("duration", "-", buckets=SECONDS, registry=registry)
        self._tokens = Histogram("response", "-", buckets=TOKENS, registry=registry)
        self._asked: dict[str, float] = {}

    def handlers(self) -> dict[type, Callable[[float, object], None]]:
        return {
            RequestSubmitted: self._submitted,
            Dispatch: self._dispatched,
            Answer: self._answered,
        }

    def _submitted(self, now: float, event: RequestSubmitted) -> None:
        self._asked[event.request] = now

    def _dispatched(self, now: float, action: Dispatch) -> None:
        self._attempts.inc()
        self._wait.observe(now - self._asked[action.request])

    def _answered(self, now: float, action: Answer) -> None:
        made = action.sample.response_tokens
        self._outcomes.labels("answered").inc()
        self._made.labels("answered").inc(made)
        self._tokens.observe(made)
        self._duration.observe(now - self._asked.pop(action.sample.request))


class World:
    """A gateway that does not listen, fronts that send requests to it, and observers."""

    def __init__(self, arm: str = "counted") -> None:
        options = Options(policy="dplb", instances=[], port=0)
        self._service = Service(options, lambda said: None, settings=Settings(poll_s=1000.0))
        self.driver = self._service.live.driver
        if arm in ("nothing", "client"):
            self.driver.pump.observers.clear()
        if arm == "client":
            self.driver.pump.observers.append(Folded(ByClient()).observe)
        self.scraped = arm == "scraped"
        self.metrics = GatewayMetrics(self._service.gateway)

    async def join(self, instances: int) -> None:
        for number in range(instances):
            await self.driver.add_instance(Silent(f"http://i{number}"))  # type: ignore[arg-type]

    async def request_us(self, requests: int) -> float:
        """Microseconds of the scheduler's CPU per request."""
        host = Host(self.driver)
        await self.join(INSTANCES)
        stubs = [Stub(host, f"f{number}") for number in range(FRONTS)]
        for number in range(OPEN):
            stubs[number % FRONTS].ask()
        began = scraped_at = time.process_time()
        for stub in stubs:
            stub.say()
        while sum(stub.answered for stub in stubs) < requests:
            await asyncio.sleep(0)
            if self.scraped and time.process_time() > scraped_at + 1.0:
                scraped_at = time.process_time()
                await self.metrics.page()
        spent = time.process_time() - began - sum(stub.spent_s for stub in stubs)
        answered = sum(stub.answered for stub in stubs)
        for stub in stubs:
            stub.over = True
        return spent / answered * 1e6

    async def scrape_ms(self) -> tuple[float, int]:
        """CPU of one scrape, and its bytes."""
        took = []
        for _ in range(SCRAPES):
            began = time.process_time()
            page, _ = await self.metrics.page()
            took.append(time.process_time() - began)
        return median(took) * 1e3, len(page)

    async def close(self) -> None:
        await self._service.close()


async def measure(arm: str, requests: int) -> float:
    world = World(arm)
    try:
        return await world.request_us(requests)
    finally:
        await world.close()


async def scrape(instances: int) -> tuple[float, int]:
    world = World()
    try:
        await world.join(instances)
        return await world.scrape_ms()
    finally:
        await world.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--requests", type=int, default=40_000)
    options = parser.parse_args(arguments)
    dice, found = random.Random(0), list[dict[str, float]]()
    for _ in range(options.repetitions):
        order = dice.sample(ARMS, len(ARMS))
        found.append({arm: asyncio.run(measure(arm, options.requests)) for arm in order})
    print("arm       us/request            more than nothing")
    for arm in ARMS:
        more = [each[arm] - each["nothing"] for each in found]
        print(f"{arm:8}  {_shown([each[arm] for each in found])}  {_shown(more)}")
    ratio = median(each["scraped"] / each["counted"] for each in found)
    for instances in FLEETS:
        took_ms, size = asyncio.run(scrape(instances))
        print(f"a scrape of {instances:,} instances: {took_ms:.1f} ms, {size / 1e3:.0f} kB")
    kept = ratio <= MOST_SCRAPED
    print(
        f"scraped over counted: {ratio:.3f}, at most {MOST_SCRAPED}: {'met' if kept else 'MISSED'}"
    )
    return int(not kept)


def _shown(values: Sequence[float]) -> str:
    return f"{median(values):6.1f} ({min(values):.1f}-{max(values):.1f})"


if __name__ == "__main__":
    sys.exit(main())
