"""`make soak`: a gateway under mixed load for long, without and with hostile clients in turn, and
without and with a client that floods it.

Exit code 1 if any observation is not as required. Everything is on 127.0.0.1; the machine needs two
cores without other load, or the latencies are those of the other load.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

import uvloop

from benchmarks.live.machine import instant
from benchmarks.live.processes import Processes
from benchmarks.soak.flood import Trainer
from benchmarks.soak.hostile import ATTACKS
from benchmarks.soak.load import Load
from benchmarks.soak.verdict import Finding, Seen, findings
from benchmarks.soak.world import ADMIN_KEY, FAULT_SHARE, World

REQUESTS = 300_000
RATE = 350.0  # calls per second, half of what two cores can do with all of this
SLICE_S = 10.0
WARM_UP_S = 2.0
#: Seconds between two slices, so that the effects of one do not count for the next.
REST_S = 1.0
#: Seconds after the last call within which the gateway must be empty.
EMPTY_WITHIN_S = 20.0
SAMPLE_S = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    option = parser.add_argument
    option("--requests", type=int, default=REQUESTS, help="in total; default: %(default)s")
    option("--seconds", type=float, help="instead of --requests: duration at the rate")
    option("--rate", type=float, default=RATE, help="calls per second; default: %(default)g")
    option("--seed", type=int, default=1, help="of the calls and their times; default: %(default)s")
    option(
        "--train-s",
        type=float,
        default=0.0,
        help="the trainer's time for a batch; with 0 it takes what the cores have left, so that "
        "what the flooding client and the instances compute counts against it (default: 0)",
    )
    option("--attack", choices=ATTACKS, action="append", help="only this one; repeatable")
    options = parser.parse_args()
    requests = int(options.seconds * options.rate) if options.seconds else options.requests
    print(f"{requests} calls, {options.rate:g} a second, seed {options.seed}", flush=True)
    found = soak(requests, options.rate, options.seed, options.attack, options.train_s)
    for finding in found:
        print(finding)
    return 0 if all(finding.holds for finding in found) else 1


def soak(
    requests: int,
    rate: float,
    seed: int,
    attacks: Sequence[str] | None = None,
    train_s: float = 0.0,
) -> list[Finding]:
    """Start everything, send the calls, check what is left, stop everything."""
    with Processes() as processes:
        world = World(processes)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            before = instant(processes.sessions)
            seen = runner.run(_soak(world, requests, rate, seed, attacks or list(ATTACKS), train_s))
            after = instant(processes.sessions)
        print(
            f"the machine was {before.busy_share(after):.0%} busy, others took "
            f"{before.foreign_share(after):.0%} of it",
            flush=True,
        )
        if tracebacks := world.tracebacks():
            print(f"the gateway logged {tracebacks} tracebacks", flush=True)
        return findings(seen)


async def _soak(
    world: World, requests: int, rate: float, seed: int, attacks: Sequence[str], train_s: float
) -> Seen:
    load = Load(world.port, seed, attacks)
    sampling = asyncio.create_task(_sample(world, load.seen))
    pairs = max(1, round(requests / rate / SLICE_S / 4))
    trainer = Trainer(world.port, ADMIN_KEY, train_s)
    give_up = 120.0 + 3 * requests / rate
    try:
        async with asyncio.timeout(give_up):
            await load.warm_up(round(WARM_UP_S * rate), rate)
            for pair in range(pairs):
                # The order alternates, so that what grows over time affects both equally.
                for beside in (bool(pair % 2), not pair % 2):
                    await asyncio.to_thread(world.faults, FAULT_SHARE if beside else 0.0)
                    await load.slice(requests // (4 * pairs), rate, beside=beside)
                    await asyncio.sleep(REST_S)
                await asyncio.to_thread(world.faults, 0.0)
                for flooded in (bool(pair % 2), not pair % 2):
                    await load.flooded(requests // (4 * pairs), rate, trainer, flooded=flooded)
                    await asyncio.sleep(REST_S)
    except TimeoutError:
        load.seen.skipped += 1
        print(f"stopped after {give_up:.0f} s", flush=True)
    sampling.cancel()
    load.close()
    load.seen.left = await _until_empty(world)
    return load.seen


async def _sample(world: World, seen: Seen) -> None:
    while True:
        seen.memory.append((time.monotonic(), float(world.memory)))
        await asyncio.sleep(SAMPLE_S)


async def _until_empty(world: World) -> str:
    left, end = "not asked", time.monotonic() + EMPTY_WITHIN_S
    while left and time.monotonic() < end:
        try:
            left = await asyncio.to_thread(world.left)
        except OSError as error:
            left = f"the gateway's state cannot be read: {error}"
        await asyncio.sleep(0.2)
    return left


if __name__ == "__main__":
    sys.exit(main())
