"""How fast a core is while others use it: `python -m benchmarks.core_pace CORE FILE`.

A virtual machine's core may be one of two threads of a physical core. While a neighbour uses the
other thread, everything takes longer (1.6 to 1.7 times was observed), for a second or for an hour,
and no counter of the machine shows it. The CPU time of a fixed small number of instructions shows
it, whoever else runs on the core. So they are run 20 times a second, which takes about 1 % of the
core.

How much an engine's steps are slowed by it is measured (`felt`): they wait for memory more than a
loop does, and for other things than their core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import log
from pathlib import Path
from statistics import mean, median, quantiles
from typing import NamedTuple

import msgspec

from rollout_sched.simulators.instance import CostModel

_EVERY_S = 0.05
_INSTRUCTIONS = range(8000)

#: Samples from this long before a time until this long after it count for the time.
_AROUND_S = 0.15

#: How much of a core's slowness may be felt: tried from none to twice as much.
_SHARES = [number / 20 for number in range(41)]


class PaceSample(NamedTuple):
    """Seconds of CPU for the instructions, and the time of the sample (monotonic clock)."""

    at: float
    seconds: float


@contextmanager
def sampled(core: int, path: Path) -> Iterator[None]:
    """Writes samples to `path` during the block, one per line; the first one at its start."""
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.core_pace", str(core), str(path)]
    process = subprocess.Popen(command)
    try:
        while not (path.exists() and read(path)):
            if process.poll() is not None:
                raise RuntimeError(f"{command} ended with {process.returncode}")
            time.sleep(_EVERY_S)
        yield
    finally:
        process.terminate()
        process.wait()


def read(path: Path) -> list[PaceSample]:
    """The samples that `sampled` wrote; a truncated last line is left out."""
    lines = path.read_text().splitlines(keepends=True)
    return [PaceSample(*map(float, line.split())) for line in lines if line.endswith("\n")]


class CorePaces:
    """How slow a core was at the times of the samples: 1 is as fast as it gets."""

    def __init__(self, samples: Sequence[PaceSample]) -> None:
        fastest = quantiles((sample.seconds for sample in samples), n=10)[0]
        self._slow = [(sample.at, sample.seconds / fastest) for sample in samples]

    def between(self, began: float, ended: float) -> float:
        """The average; without samples in that time, the nearest one."""
        low, high = began - _AROUND_S, ended + _AROUND_S
        found = [slow for at, slow in self._slow if low <= at <= high]
        return mean(found) if found else min(self._slow, key=lambda one: abs(one[0] - began))[1]


class PacedTime(NamedTuple):
    """Seconds that something took, and how slow the core was at that time."""

    seconds: float
    slow: float


def factor(slow: float, share: float) -> float:
    """How many times as long steps take on such a slow core if they feel a share of it."""
    return 1 + share * (slow - 1)


def felt(each: Mapping[object, Iterable[PacedTime]]) -> float:
    """The share of a core's slowness that makes repeated times of the same thing most alike. Longer
    times have more weight, because more samples show how slow the core was."""
    repeated = [list(times) for times in each.values()]
    return min(_SHARES, key=lambda share: sum(_apart(times, share) for times in repeated))


def _apart(times: Sequence[PacedTime], share: float) -> float:
    logs = [log(taken.seconds / factor(taken.slow, share)) for taken in times]
    middle = median(logs)
    long = median(taken.seconds for taken in times)
    return long * sum(abs(value - middle) for value in logs)


def scaled(cost: CostModel, times: float) -> CostModel:
    """The constants of a machine on which everything takes `times` as long."""
    seconds = {
        name: value * times
        for name, value in msgspec.structs.asdict(cost).items()
        if name.endswith("_s")
    }
    return msgspec.structs.replace(cost, **seconds)


def main(core: str, path: str) -> None:
    """Runs until it is stopped."""
    os.sched_setaffinity(0, {int(core)})
    with open(path, "w", buffering=1) as file:
        while True:
            file.write(f"{time.monotonic()} {_loop_s()}\n")
            time.sleep(_EVERY_S)


def _loop_s() -> float:
    total, start = 0, time.thread_time()
    for number in _INSTRUCTIONS:
        total += number * number
    return time.thread_time() - start


if __name__ == "__main__":
    main(*sys.argv[1:])
