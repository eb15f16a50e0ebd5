"""Compare our scheduler with verl's own load balancer in choosing servers for requests, on Ray.

`python -m benchmarks.verl_balancer`, or `make bench-ray`, with the package verl. Either is an actor
before 256 servers, with four clients that are actors, too. A client asks for a server, gets one,
reports the end of the request, and asks for the next: verl's by calls of its actor
(`acquire_server`, awaited; `release_server`, not awaited, as in its `LLMServerClient`), ours by
frames over a connection (submitted; tokens and end). Ours asks for the next when the answer is
ordered, so a request takes two round trips, verl's one; the wait is measured to the choice alone.

There is no target. Rounds of both alternate; figures are medians.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from typing import Any, NamedTuple

import ray

from benchmarks.ray_stubs import INSTANCES, Load, leave, percentiles, stage

CLIENTS = 4
OPEN = (1, 64)  # requests of each client in flight
SECONDS = 3.0
ROUNDS = 3


class Server:
    """verl hands out handles of its servers; one handle represents all here."""


class Client:
    """A client of verl's balancer."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def saturate(self, balancer: Any, open_at_once: int, seconds: float) -> Load:
        began, spent = time.perf_counter(), time.process_time()
        waits: list[float] = []

        async def one_after_another(lane: int) -> None:
            number = 0
            while (asked := time.perf_counter()) < began + seconds:
                number += 1
                request = f"{self._name}.{lane}.{number}"
                server, _ = await balancer.acquire_server.remote(request_id=request)
                waits.append(time.perf_counter() - asked)
                balancer.release_server.remote(server_id=server)

        await asyncio.gather(*(one_after_another(lane) for lane in range(open_at_once)))
        return Load(len(waits), waits, time.process_time() - spent)


class Figures(NamedTuple):
    """choices per second; milliseconds to one, p50 and p99"""

    rate: float
    p50: float
    p99: float


def verls_stage() -> tuple[Any, list[Any]]:
    """verl's balancer as verl makes it, and its clients, when all have started, which is slow."""
    from verl.workers.rollout.router import get_router_handle  # slow, and useless to clients

    server = ray.remote(Server).options(num_cpus=0).remote()
    balancer = get_router_handle({f"i{number}": server for number in range(INSTANCES)})
    clients = [ray.remote(Client).options(num_cpus=0).remote(f"c{n}") for n in range(CLIENTS)]
    ray.get([client.saturate.remote(balancer, 1, 0.5) for client in clients])
    return balancer, clients


def verls(balancer: Any, clients: list[Any], open_at_once: int) -> Figures:
    loads = ray.get([c.saturate.remote(balancer, open_at_once, SECONDS) for c in clients])
    return _figures(loads)


def ours(open_at_once: int) -> Figures:
    scheduler, fronts = stage(CLIENTS)
    loads = ray.get([front.saturate.remote(open_at_once, SECONDS) for front in fronts])
    leave(scheduler, fronts)
    return _figures(loads)


def _figures(loads: list[Load]) -> Figures:
    return Figures(sum(load.answered for load in loads) / SECONDS, *percentiles(loads))


def _median(rounds: list[Figures]) -> Figures:
    return Figures(*(statistics.median(column) for column in zip(*rounds, strict=True)))


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        balancer, clients = verls_stage()
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
        print(f"{CLIENTS} clients, {INSTANCES} servers; medians of {ROUNDS} rounds")
        for open_at_once in OPEN:
            rounds = [
                (ours(open_at_once), verls(balancer, clients, open_at_once)) for _ in range(ROUNDS)
            ]
            for who, figures in zip(("ours", "verl's"), zip(*rounds, strict=True), strict=True):
                rate, p50, p99 = _median(list(figures))
                print(
                    f"{open_at_once} in flight per client, {who}: {rate:,.0f} choices a second, "
                    f"each after {p50:.2f} ms (p50), {p99:.2f} ms (p99)"
                )
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
