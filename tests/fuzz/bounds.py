"""What one input may cost: CPU time and memory, and no more than twice as much for twice as much.

CPU time is this process's own, so that a machine with other work on it changes little.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from types import FrameType

from tests.fuzz.laws import Broken
from tests.fuzz.target import Target, repeated

CPU_S = 2.0
#: Bytes that one input may need, and as many times its own length.
MEMORY = 48 * 2**20
MEMORY_TIMES = 100
#: Of the whole process, for compiled code hears of no signal until it returns.
ADDRESS_SPACE = 8 * 2**30

#: Inputs of these lengths are compared; a cost that grows with the square would be 64 times higher.
SMALL = 64 * 1024
LARGE = 8 * SMALL
MOST_TIMES = 24.0
#: CPU seconds that tell nothing.
NOISE_S = 0.12


class TookTooLong(BaseException):
    """Nothing that catches errors may catch it."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises Broken when the block has used so much CPU time. In the main thread only."""
    fired = False

    def fire(number: int, frame: FrameType | None) -> None:
        nonlocal fired
        fired = True
        raise TookTooLong

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, hard))
    before = signal.signal(signal.SIGPROF, fire)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.2)
    try:
        yield
    except BaseException:
        if not fired:
            raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    if fired:
        raise Broken(f"an input takes less than {seconds:g} s")


def bounded(target: Target, data: bytes) -> None:
    """The target's laws and, within them, its bounds."""
    peak = _peak()
    with cpu_limit(CPU_S):
        target.check(data)
    if _peak() - peak > MEMORY // 4:
        check_memory(target.check, data)  # the peak may be the collector's whim: measured now


def check_memory(use: Callable[[bytes], None], data: bytes) -> None:
    gc.collect()
    tracemalloc.start()
    try:
        use(data)
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if used > MEMORY + MEMORY_TIMES * len(data):
        raise Broken("an input needs little memory", f"{used / 2**20:.0f} MiB")


def check_growth(target: Target, data: bytes, start: int, end: int) -> None:
    """Eight times as much of a part may cost eight times as much, not sixty-four times."""
    small, large = (repeated(data, start, end, size) for size in (SMALL, LARGE))
    with cpu_limit(10 * CPU_S), _of_this_alone():
        times = _cpu_s(target, large)
        if times < NOISE_S:
            return
        few = _often(target, small)
        many = min(times, _cpu_s(target, large))
    if many > NOISE_S and many > MOST_TIMES * few:
        told = f"{few:.4f} s for {len(small)} bytes, {many:.4f} s for {len(large)}"
        raise Broken("what an input costs grows with its length, not with the square", told)


@contextlib.contextmanager
def _of_this_alone() -> Iterator[None]:
    """The collector passes over what is there already: its passes over everything that other tests
    have left come with a large input and not with a small one."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _often(target: Target, data: bytes) -> float:
    """CPU seconds of one time, of as many as the clock's coarse ticks can measure."""
    start, times = time.process_time(), 0
    while (spent := time.process_time() - start) < NOISE_S or times < 3:
        target.spend(data)
        times += 1
    return spent / times


def _cpu_s(target: Target, data: bytes) -> float:
    start = time.process_time()
    target.spend(data)
    return time.process_time() - start


def memory() -> int:
    """Bytes that the process holds now."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
