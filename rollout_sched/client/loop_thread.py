"""An event loop in its own thread, for callers that have no event loop or that block theirs."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rollout_sched import process as event_loop
from rollout_sched.core.model.errors import CallerError

R = TypeVar("R")


class LoopThread:
    """An event loop in a daemon thread: it ends with the program if `stop` is not called."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event
        self._thread: threading.Thread
        self._process = 0

    def open(self, name: str) -> None:
        """Start the thread under the name `name`."""
        running = threading.Event()

        async def live() -> None:
            self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
            running.set()
            await self._end.wait()

        self._process = os.getpid()
        self._thread = threading.Thread(
            target=lambda: event_loop.run(live()), name=name, daemon=True
        )
        self._thread.start()
        running.wait()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Wait for `work`; return its result or raise its error. An interrupted wait, as by Ctrl-C,
        cancels `work`."""
        if self._loop is not None and threading.current_thread() is self._thread:
            work.close()
            raise CallerError(
                "a tool or a loader runs in the event loop that this call would wait for "
                "(deadlock); pass it what it needs before it starts"
            )
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        if self._loop is None or self._process != os.getpid():
            work.close()
            raise CallerError(
                "its event loop is not running; use it in a `with` block"
                if self._loop is None
                else "its event loop does not exist in this forked process; connect to a gateway "
                "from here"
            )
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        assert self._loop is not None  # started
        loop, self._loop = self._loop, None
        loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
