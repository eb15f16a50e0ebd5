"""Several runs at once, each in one of several processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")

#: What all calls of a process have in common, sent to it once.
_shared: tuple[Any, ...] = ()


def call_each(
    call: Callable[..., T],
    shared: tuple[Any, ...],
    arguments: Sequence[tuple[Any, ...]],
    jobs: int,
    done: Callable[[int, T], None],
) -> list[T]:
    """`call(*shared, *each)` for each of the arguments, in so many processes; what they return in
    the order of the arguments. `done(number, result)` is told of each as it is over.

    All of it must be such that it can be pickled. What a call raises is raised here, and those that
    have not begun are not made any more.
    """
    processes = min(jobs, len(arguments))
    # A fork would copy the threads' locks of whoever shows progress.
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
    """Interrupts from the keyboard are for the parent alone."""
    global _shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _shared = shared


def _call(call: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    return call(*_shared, *arguments)
