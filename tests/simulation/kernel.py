"""Several simulated processes on one virtual clock, one running at a time. Each has its own event
loop and can die at any point.

When a process is dead, none of its callbacks is called and no task continues. So a crash needs no
cooperation of the crashing code.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import events
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from typing import Any

from tests.simulation import threads
from tests.virtual_loop import VirtualLoop

log = logging.getLogger(__name__)

#: Most callbacks without progress of the time; more of them count as an endless loop.
MAX_STEPS = 1_000_000


class Kernel(VirtualLoop):
    """The clock and the queue of all processes' callbacks. It is also the world's own process: code
    outside the program runs on its loop."""

    dead = stopped = False

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[Process] = []
        self._jumps = 0  # at the current time

    def spawn(self, name: str, host: str, network: Any) -> Process:
        """Start a process. `network`: its network (`network.Network`)."""
        process = Process(self, name, host)
        process.network = network
        self.processes.append(process)
        return process

    def _jump(self) -> None:
        before = self.time()
        super()._jump()
        self._jumps = 0 if self.time() > before else self._jumps + 1
        if self._jumps > MAX_STEPS:
            raise RuntimeError(f"time stands still at {before} s: {self.timeline.ready[0]}")

    def _settle(self) -> None:
        steps, ready = 0, self.timeline.ready
        while ready:
            steps += 1
            if steps > MAX_STEPS:
                raise RuntimeError(f"endless callbacks at {self.time()} s: {ready[0]}")
            handle = ready.popleft()
            loop: Any = handle._loop  # type: ignore[attr-defined]
            if handle.cancelled() or loop.dead:
                continue
            if loop.stopped:
                loop.extend_deadline(handle)
                continue
            events._set_running_loop(loop)
            handle._run()
            if self._error is not None:
                error, self._error = self._error, None
                raise error
        events._set_running_loop(self)


class Process(VirtualLoop):
    """One process on a host: an event loop that shares the kernel's clock and queue.

    The callbacks in `on_exit` are called once, when it is killed.
    """

    def __init__(self, kernel: Kernel, name: str, host: str) -> None:
        super().__init__(kernel.timeline)
        self.kernel = kernel
        self.name = name
        self.host = host
        self.dead = False
        self.stopped = False
        self.on_exit: list[Callable[[], None]] = []
        self.network: Any = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._put_off: list[asyncio.Handle] = []

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        # Tasks of a dead process must not be collected in the middle of a run.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def start(self, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a program in it; an error of the program ends the run, unless the process is dead."""
        running = events._get_running_loop()
        events._set_running_loop(self)
        try:
            task = self.create_task(main)
        finally:
            events._set_running_loop(running)
        task.add_done_callback(_raise)
        return task

    async def finish(self, main: Coroutine[Any, Any, Any]) -> None:
        """Run a program until it or the process has ended. Awaited on the kernel's loop."""
        over = self.kernel.create_future()

        def end(*_: object) -> None:
            if not over.done():
                over.set_result(None)

        self.start(main).add_done_callback(end)
        self.on_exit.append(end)
        await over

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        return [task for task in self._tasks if not task.done()]

    def forget(self) -> None:
        """Close the coroutines that can never continue, one by one: CPython 3.11 crashed when its
        collector closed coroutines that waited for each other."""
        for task in list(self._tasks):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            with suppress(Exception):
                coroutine.close()
        self._tasks.clear()
        self.on_exit.clear()

    def stop(self) -> None:
        """Stop it with all its threads, as by SIGSTOP, until `go_on`."""
        self.stopped = True

    def resume(self) -> None:
        self.stopped = False
        self.timeline.ready.extend(self._put_off)
        self._put_off.clear()

    def extend_deadline(self, handle: asyncio.Handle) -> None:
        """Delay a callback until the process continues."""
        self._put_off.append(handle)

    def kill(self) -> None:
        """Kill it: from now on it does nothing."""
        if not self.dead:
            self.dead = True
            for call in self.on_exit:
                call()

    def is_running(self) -> bool:
        return not self.dead

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.dead:
            return
        if "handle" in context:
            self.kernel._error = context["exception"]
        else:
            log.error("%s: %s", self.name, context["message"], exc_info=context.get("exception"))

    # -- system calls of a program -----------------------------------------------------------

    def run_in_executor(self, executor: None, function: Callable[..., Any], *args: Any) -> Any:
        return threads.run(self, function, *args)

    async def create_server(
        self, factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        return self.network.listen(self, factory, host or self.host, port or 0)

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: Any = None, port: Any = None, *, sock: Any = None, **_: Any
    ) -> Any:
        return await self.network.connect(self, factory, host, port, sock)

    async def sock_connect(self, sock: Any, address: Any) -> None:
        """Reach the server. `create_connection` then gets the socket and makes the connection."""
        await self.network.reach(self, sock, address)


def _raise(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.result()
