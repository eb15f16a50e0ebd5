"""`make simulate`: simulates a gateway, its fleet, its trainers and its clients, with faults that a
seed decides.

If a law is broken, it prints what happened in that run and the command that repeats it, and exits
with 1.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import time
from itertools import count

from tests.simulation.plan import EVERYTHING, draw
from tests.simulation.runner import check, check_all, shrunk, told


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    option = parser.add_argument
    option("seed", type=int, nargs="*", help="repeat only these runs")
    option("--seeds", type=int, help="so many runs")
    option("--minutes", type=float, help="how long to start new runs")
    option("--base", type=int, help="the first seed; default: any")
    option("--jobs", type=int, default=1, help="processes; default: %(default)d")
    option("--shrink", action="store_true", help="reduce a failing plan to what it needs to fail")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.seed:
        return max(_again(seed, options.shrink) for seed in options.seed)
    base = EVERYTHING + secrets.randbelow(2**31) if options.base is None else options.base
    seeds = count(base) if options.seeds is None else range(base, base + options.seeds)
    seconds = None if options.minutes is None else 60 * options.minutes
    if options.seeds is None and seconds is None:
        parser.error("give --seeds or --minutes")
    return _many(seeds, base, options.jobs, seconds)


def _many(seeds, base: int, jobs: int, seconds: float | None) -> int:
    print(f"seeds from {base}", flush=True)
    began, runs, broken = time.monotonic(), 0, []
    for seed, outcome in check_all(seeds, jobs, seconds):
        runs += 1
        if outcome.broken:
            broken.append(seed)
            print(f"\nBROKEN {told(outcome)}\n", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"{runs} runs, {runs / minutes:.0f} a minute; {len(broken)} broke a law {broken or ''}")
    return 1 if broken else 0


def _again(seed: int, shrink: bool) -> int:
    outcome = check(seed)
    if not outcome.broken:
        print(f"seed {seed}: all laws hold; journal {outcome.journal}")
        return 0
    print(told(shrunk(draw(seed)) if shrink else outcome))
    return 1


if __name__ == "__main__":
    sys.exit(main())
