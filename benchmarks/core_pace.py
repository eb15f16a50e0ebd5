"""How fast a core is while somebody else uses it: `python -m benchmarks.core_pace CORE FILE`.

A virtual machine's core may be one of two threads of a real one. While a neighbour is at work on
the other, everything takes longer (1.6 to 1.7 times was seen), for a second or for an hour, and
nothing that the machine counts shows it. The CPU time of the same few instructions does, whoever
else runs on the core: so they are run 20 times a second, which takes about a hundredth of it.

What an engine's steps feel of that is for measurements to say (`felt`): they wait for memory more
than a loop does, and for others than their core.
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

from rollout_sched.simulators.instance.cost_model import CostModel

_EVERY_S = 0.05
_INSTRUCTIONS = range(8000)

#: Samples from so long before until so long after tell of a time.
_AROUND_S = 0.15

#: How much of a core's slowness might be felt: tried from none to twice as much.
_SHARES = [number / 20 for number in range(41)]


class PaceSample(NamedTuple):
    """Seconds of CPU that the same instructions took, and when (of the monotonic clock)."""

    at: float
    seconds: float


@contextmanager
def sampled(core: int, path: Path) -> Iterator[None]:
    """Samples are written to `path` meanwhile, one a line; there is one when it begins."""
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
    """What `sampled` wrote; a last line that was cut is left out."""
    lines = path.read_text().splitlines(keepends=True)
    return [PaceSample(*map(float, line.split())) for line in lines if line.endswith("\n")]


class CorePaces:
    """How slow a core was, at times of which there are samples: 1 is as fast as it gets."""

    def __init__(self, samples: Sequence[PaceSample]) -> None:
        fastest = quantiles((sample.seconds for sample in samples), n=10)[0]
        self._slow = [(sample.at, sample.seconds / fastest) for sample in samples]

    def between(self, began: float, ended: float) -> float:
        """On average; as in the sample next to that time where there is none of it."""
        low, high = began - _AROUND_S, ended + _AROUND_S
        found = [slow for at, slow in self._slow if low <= at <= high]
        return mean(found) if found else min(self._slow, key=lambda one: abs(one[0] - began))[1]


class PacedTime(NamedTuple):
    """Seconds that something took while the core was so slow."""

    seconds: float
    slow: float


def factor(slow: float, share: float) -> float:
    """How many times as long steps take on a core that is so slow, of which they feel a share."""
    return 1 + share * (slow - 1)


def felt(each: Mapping[object, Iterable[PacedTime]]) -> float:
    """The share of a core's slowness that makes times of the same thing most alike. Longer ones say
    more, for more samples tell how slow it was meanwhile."""
    repeated = [list(times) for times in each.values()]
    return min(_SHARES, key=lambda share: sum(_apart(times, share) for times in repeated))


def _apart(times: Sequence[PacedTime], share: float) -> float:
    logs = [log(taken.seconds / factor(taken.slow, share)) for taken in times]
    middle = median(logs)
    long = median(taken.seconds for taken in times)
    return long * sum(abs(value - middle) for value in logs)


def scaled(cost: CostModel, times: float) -> CostModel:
    """Constants of a machine on which everything takes so many times as long."""
    seconds = {
        name: value * times
        for name, value in msgspec.structs.asdict(cost).items()
        if name.endswith("_s")
    }
    return msgspec.structs.replace(cost, **seconds)


def main(core: str, path: str) -> None:
    """Until somebody ends it."""
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
