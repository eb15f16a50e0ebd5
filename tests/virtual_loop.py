"""An asyncio event loop in virtual time: it never waits, it jumps to the next timer.

Timers run in the order of (time, scheduling). Everything that a timer triggers runs before the next
timer, even at the same time. So a program on it is as deterministic as a simulation on
`simulators.replay.event_queue`. There is no I/O: no sockets, threads, signals or subprocesses.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class Stuck(RuntimeError):
    """Deadlock: all tasks wait, and no timer is left to wake one."""


class Timeline:
    """Virtual seconds from 0, and the callbacks that are due now and later. Several loops may share
    one timeline."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._serial = 0

    def add(self, when: float, timer: asyncio.TimerHandle) -> None:
        self._serial += 1
        heappush(self._timers, (max(when, self.now), self._serial, timer))

    def jump(self) -> None:
        """Go to the next timer. Raises Stuck."""
        while self._timers:
            when, _, timer = heappop(self._timers)
            if not timer.cancelled():
                self.now = when
                self.ready.append(timer)
                return
        raise Stuck(f"deadlock at {self.now} s: all tasks wait, and no timer is left")

    def clear(self) -> None:
        self.ready.clear()
        self._timers.clear()


class VirtualLoop(asyncio.AbstractEventLoop):
    """A loop on a timeline (its own if none is given). `run_until_complete` raises what a callback
    raises."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = Timeline() if timeline is None else timeline
        self._running = False
        self._closed = False
        self._error: BaseException | None = None

    def time(self) -> float:
        return self.timeline.now

    # -- scheduling ------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.timeline.ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self.timeline.add(when, timer)
        return timer

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are skipped when they are due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Any = None
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    # -- running ---------------------------------------------------------------------------

    def run_until_complete(self, future: Any) -> Any:
        """The result of a coroutine or future. Raises Stuck if it can never finish."""
        task = asyncio.ensure_future(future, loop=self)
        self._running = True
        events._set_running_loop(self)
        try:
            self._settle()
            while not task.done():
                self._jump()
                self._settle()
            return task.result()
        finally:
            events._set_running_loop(None)
            self._running = False

    def _settle(self) -> None:
        """Run everything that is due now."""
        ready = self.timeline.ready
        while ready:
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()
            if self._error is not None:
                error, self._error = self._error, None
                raise error

    def _jump(self) -> None:
        """Go to the next timer."""
        self.timeline.jump()

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self.timeline.clear()
        self._closed = True

    async def shutdown_asyncgens(self) -> None:
        """Asynchronous generators are left to the garbage collector."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is no executor."""

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """There is no debug mode."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if "handle" in context:
            self._error = context["exception"]
        else:
            log.error("%s", context["message"], exc_info=context.get("exception"))

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time: whatever still runs at the end is cancelled."""
    loop = VirtualLoop()  # type: ignore[abstract]  # no I/O, on purpose
    try:
        return loop.run_until_complete(main)  # type: ignore[no-any-return]
    finally:
        rest = asyncio.all_tasks(loop)
        for task in rest:
            task.cancel()
        if rest:
            loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        loop.close()
