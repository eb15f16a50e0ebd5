"""Limits the cost of one input: CPU time and memory, and at most linear growth with its length.

CPU time is that of this process, so other work on the machine changes little.
"""

from __future__ import annotations

import contextlib
import ctypes
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
#: Bytes that one input may use, plus MEMORY_TIMES times its own length.
MEMORY = 48 * 2**20
MEMORY_TIMES = 100
#: Limit of the whole process: compiled code does not handle signals until it returns.
ADDRESS_SPACE = 8 * 2**30

#: Inputs of these lengths are compared; a cost that grows with the square would be 64 times higher.
SMALL = 64 * 1024
LARGE = 8 * SMALL
MAX_TIMES = 24.0
#: CPU seconds below which a measurement is noise.
NOISE_S = 0.12


class TookTooLong(BaseException):
    """A BaseException, so that code that catches errors does not catch it."""


@contextlib.contextmanager
def cpu_limit(seconds: float, memory: int | None = None) -> Iterator[None]:
    """Raises Broken when the block has used `seconds` of CPU time. Only in the main thread.

    `memory`: bytes that it may allocate beyond what the process has; else it gets a MemoryError.
    """
    fired = False

    def fire(number: int, frame: FrameType | None) -> None:
        nonlocal fired
        fired = True
        raise TookTooLong

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    space = ADDRESS_SPACE if memory is None else _pages(0) * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (space, hard))
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
    """Check the target's laws and its bounds."""
    peak = _peak()
    with cpu_limit(CPU_S):
        target.check(data)
    if _peak() - peak > MEMORY // 4:
        check_memory(target.check, data)  # the peak may depend on the collector: measure again


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
    """A part that is eight times longer may cost eight times as much, not sixty-four times."""
    small, large = (repeated(data, start, end, size) for size in (SMALL, LARGE))
    with cpu_limit(10 * CPU_S), _of_this_alone():
        times = _cpu_s(target, large)
        if times < NOISE_S:
            return
        few = _often(target, small)
        many = min(times, _cpu_s(target, large))
    if many > NOISE_S and many > MAX_TIMES * few:
        told = f"{few:.4f} s for {len(small)} bytes, {many:.4f} s for {len(large)}"
        raise Broken("the cost of an input grows linearly with its length", told)


@contextlib.contextmanager
def _of_this_alone() -> Iterator[None]:
    """Make the collector ignore existing objects: its passes over what other tests have left happen
    during a large input, but not during a small one."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _often(target: Target, data: bytes) -> float:
    """CPU seconds of one run, averaged over enough runs for the clock's coarse ticks."""
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
    """Bytes of memory that the process uses now, without what the allocator keeps for later: after
    long inputs that is a tenth or more."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    return _pages(1) * resource.getpagesize()


def _pages(column: int) -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[column])


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
