"""Run several calls in parallel, each in one of several processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")

#: The arguments that all calls of a process share, sent to it once.
_shared: tuple[Any, ...] = ()


def call_each(
    call: Callable[..., T],
    shared: tuple[Any, ...],
    arguments: Sequence[tuple[Any, ...]],
    jobs: int,
    done: Callable[[int, T], None],
) -> list[T]:
    """`call(*shared, *each)` for each of the arguments, in `jobs` processes; returns the results in
    the order of the arguments. Calls `done(number, result)` as each finishes.

    Everything must be picklable. An exception of a call is raised here, and calls that have not
    started are cancelled.
    """
    processes = min(jobs, len(arguments))
    # Spawn, because a fork would copy the locks of the thread that shows progress.
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin, shared) as pool:
        futures = [pool.submit(_call, call, each) for each in arguments]
        numbers = {future: number for number, future in enumerate(futures)}
        try:
            for future in as_completed(futures):
                done(numbers[future], future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _begin(*shared: Any) -> None:
    """Only the parent handles Ctrl-C."""
    global _shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _shared = shared


def _call(call: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    return call(*_shared, *arguments)
