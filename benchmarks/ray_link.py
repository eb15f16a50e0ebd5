"""The cost of a deployment on Ray: `python benchmarks/ray_link.py`, or `make bench-ray`.

1. A frame of 5 KB as a call of an actor, and over our own connection: CPU at either end.
2. Decisions per second of one scheduler's actor with 1, 2 and 4 fronts (also actors), which answer
   each order at once: three events per request and all that follows from them, over connections.
   Target: 20,000 with four.
3. What the link adds to a dispatch, from the submission of a request to the arrival of its order,
   at 2,200 requests per second from four fronts, each answered after some seconds. Targets: p50
   3 ms, p99 15 ms.
4. A front's CPU per request compared with a gateway in one process, both before the same simulated
   server, with the same client. Target: 1.15 times.

Exit code 1 if a target is missed. Everything is on one machine: with fewer cores than processes
they wait for each other.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import aiohttp
import ray

from benchmarks.ray_stubs import EVENTS, FRAME, Load, leave, percentiles, stage
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.ray import cluster as clusters
from rollout_sched.integrations.ray.deployment import NAMESPACE, Deployment
from tests.neighbours.fleet import Program, fake_instance, gateway

CALLS = 1000

OPEN = 4096  # requests in flight, to measure throughput
SECONDS = 6.0
DECISIONS = 20_000  # per second

RATE, HOLD_S = 2200, 5.0  # requests per second, and how long each is in flight
P50_MS, P99_MS = 3.0, 15.0

REQUESTS, AT_ONCE = 3000, 32
FRONT_SHARE = 1.15


def frames() -> None:
    scheduler, (front,) = stage(1)
    before, began = ray.get(scheduler.spent.remote()), time.perf_counter()
    caller = ray.get(front.calls.remote(scheduler, CALLS))
    took = time.perf_counter() - began
    called = ray.get(scheduler.spent.remote()) - before
    print(
        f"a frame of {FRAME} bytes as an actor's call: {caller / CALLS * 1e6:.0f} us of CPU for "
        f"the caller, {called / CALLS * 1e6:.0f} us for the actor; {CALLS / took:.0f} a second, "
        "one after the other"
    )
    leave(scheduler, [front])


def throughput(fronts: int) -> float:
    scheduler, made = stage(fronts)
    before = ray.get(scheduler.spent.remote())
    loads: list[Load] = ray.get([f.saturate.remote(OPEN // fronts, SECONDS) for f in made])
    spent = ray.get(scheduler.spent.remote()) - before
    answered = sum(load.answered for load in loads)
    rate = answered * EVENTS / SECONDS
    stubs = sum(load.spent_s for load in loads)
    print(
        f"{fronts} fronts: {rate:,.0f} decisions a second; a request costs the scheduler's process "
        f"{spent / answered * 1e6:.0f} us of CPU, the stubs {stubs / answered * 1e6:.0f} us"
    )
    leave(scheduler, made)
    return rate


def latency(fronts: int) -> tuple[float, float]:
    """(p50, p99) in milliseconds."""
    scheduler, made = stage(fronts)
    before = ray.get(scheduler.spent.remote())
    paced: list[Load] = ray.get([f.pace.remote(RATE / fronts, HOLD_S, SECONDS * 2) for f in made])
    spent = ray.get(scheduler.spent.remote()) - before
    p50, p99 = percentiles(paced)
    print(
        f"{RATE} requests/s from {fronts} fronts, {RATE * HOLD_S:,.0f} in flight: an order "
        f"arrives after {p50:.2f} ms (p50), {p99:.2f} ms (p99); the scheduler's process takes "
        f"{spent / (SECONDS * 2 + HOLD_S):.2f} cores"
    )
    leave(scheduler, made)
    return p50, p99


# -- a front beside one process --------------------------------------------------------------


def _cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _call(url: str, requests: int) -> None:
    body = {"model": "m", "prompt": list(range(200)), "max_tokens": 4, "temperature": 0.0}
    room = asyncio.Semaphore(AT_ONCE)
    connections = aiohttp.TCPConnector(limit=AT_ONCE)
    async with aiohttp.ClientSession(connector=connections) as session:

        async def one() -> None:
            async with room, session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

        await asyncio.gather(*(one() for _ in range(requests)))


async def _cost(url: str, pid: int) -> float:
    """Microseconds of a process's CPU per request."""
    await _call(url, REQUESTS // 10)
    before = _cpu_s(pid)
    await _call(url, REQUESTS)
    return (_cpu_s(pid) - before) / REQUESTS * 1e6


@contextmanager
def _server() -> Iterator[Program]:
    with fake_instance("--model", "m", "--speed", "1000", "--max-num-seqs", "512") as server:
        yield server


async def _front(server: Program) -> tuple[float, float]:
    """Microseconds of CPU per request: of the front, and of the scheduler's process."""
    deployment = Deployment(name="bench", fronts=1)
    await clusters.start(Options(policy="dplb", instances=[server.url], port=0), deployment)
    try:
        scheduler = await clusters.found(deployment)
        front = ray.get_actor(deployment.front(0), NAMESPACE)
        url = await front.url.remote()
        here = [
            await actor.__ray_call__.remote(lambda self: os.getpid())
            for actor in (front, scheduler)
        ]
        while not await _answers(url):
            await asyncio.sleep(0.1)
        before = _cpu_s(here[1])
        cost = await _cost(url, here[0])
        return cost, (_cpu_s(here[1]) - before) / (REQUESTS * 1.1) * 1e6
    finally:
        await clusters.stop(deployment)


async def _answers(url: str) -> bool:
    try:
        await _call(url, 1)
    except (AssertionError, aiohttp.ClientError):
        return False
    return True


def front_cost(rounds: int = 3) -> float:
    """A front's CPU per request, as a share of one process's."""
    shares = []
    for _ in range(rounds):
        with ExitStack() as stack:
            server = stack.enter_context(_server())
            one = stack.enter_context(gateway([server.url]))
            alone = asyncio.run(_cost(one.url, one.pid))
        with _server() as server:
            front, scheduler = asyncio.run(_front(server))
        shares.append(front / alone)
        print(
            f"CPU per request: {alone:.0f} us in one process; {front:.0f} us in a front plus "
            f"{scheduler:.0f} us in the scheduler's process"
        )
    return statistics.median(shares)


def main() -> int:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        namespace=NAMESPACE,
    )
    try:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
        frames()
        rates = [throughput(fronts) for fronts in (1, 2, 4)]
        p50, p99 = latency(4)
        share = front_cost()
    finally:
        ray.shutdown()
    missed = {
        f"{DECISIONS:,} decisions a second from four fronts": rates[-1] < DECISIONS,
        f"p50 {P50_MS:g} ms": p50 > P50_MS,
        f"p99 {P99_MS:g} ms": p99 > P99_MS,
        f"a front's CPU within {FRONT_SHARE} of one process's ({share:.2f})": share > FRONT_SHARE,
    }
    for target, is_missed in missed.items():
        print(f"{'missed' if is_missed else 'met'}: {target}")
    return int(any(missed.values()))


if __name__ == "__main__":
    sys.exit(main())
