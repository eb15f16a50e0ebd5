"""Threads that take turns with the event loops: one thing runs at a time, in virtual time.

They run the real code, including locks and waits (`store.writer`), on real threads. A thread runs
until it waits for something or for the disk; then the kernel continues and later resumes the
thread. So the event queue alone decides what runs when.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

_here = threading.local()


class Killed(BaseException):
    """The process of the thread is dead."""


class SimulatedThread:
    """Like `threading.Thread`; it belongs to the process that creates it."""

    def __init__(
        self, target: Callable[[], object], name: str = "", daemon: bool | None = None
    ) -> None:
        self.process = running_process()
        self.done = False
        self.error: BaseException | None = None
        self._target = target
        self._turn = threading.Semaphore(0)
        self._given_back = threading.Semaphore(0)
        self._joining: list[SimulatedThread] = []
        self._real = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        if self.process.dead:
            return  # the process is in its last callback
        self.process.on_exit.append(self._end)
        self._real.start()
        self.process.call_soon(self.resume)

    def join(self) -> None:
        """Called from another thread of the process."""
        while not self.done:
            me = current()
            assert me is not None, "an event loop must not wait for a thread"
            self._joining.append(me)
            me.wait()

    def resume(self) -> None:
        """Run the thread until it waits again. Called by the kernel."""
        if self.done:
            return
        self._turn.release()
        self._given_back.acquire()
        if self.done:
            if self.error is not None:
                raise self.error
            for thread in self._joining:
                thread.process.call_soon(thread.resume)

    def wait(self) -> None:
        """Wait until the thread is resumed. Called by the thread itself. Raises Killed."""
        self._given_back.release()
        self._turn.acquire()
        if self.process.dead:
            raise Killed

    def sleep(self, seconds: float) -> None:
        """Called by the thread itself. Raises Killed."""
        self.process.call_later(seconds, self.resume)
        self.wait()

    def _main(self) -> None:
        self._turn.acquire()
        _here.thread = self
        try:
            if not self.process.dead:
                self._target()
        except Killed:
            pass
        except BaseException as error:
            if not self.process.dead:
                self.error = error
        finally:
            self.done = True
            self._given_back.release()

    def _end(self) -> None:
        """End the thread with its process, unless the thread itself caused the death and runs."""
        if not self.done and current() is not self:
            self._turn.release()
            self._given_back.acquire()


class SimulatedLoopThread:
    """Like `client.blocking.LoopThread`, but its coroutines run in the loop of its process,
    independently of the others there."""

    def open(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(work)

    def stop(self) -> None:
        """Does nothing: its tasks are already cancelled."""


class SimulatedCondition:
    """Like `threading.Condition`, for threads of one process that take turns."""

    def __init__(self) -> None:
        self._waiting: list[SimulatedThread] = []

    def __enter__(self) -> SimulatedCondition:
        return self

    def __exit__(self, *error: object) -> None:
        """Releases nothing: no other thread runs."""

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        thread = current()
        assert thread is not None, "an event loop must not wait for a thread"
        loop = thread.process
        deadline = None if timeout is None else loop.time() + timeout
        while not predicate() and (deadline is None or loop.time() < deadline):
            self._waiting.append(thread)
            timer = None if deadline is None else loop.call_at(deadline, self._wake, thread)
            thread.wait()
            if timer is not None:
                timer.cancel()
        return predicate()

    def notify(self) -> None:
        for thread in tuple(self._waiting):
            thread.process.call_soon(self._wake, thread)

    def _wake(self, thread: SimulatedThread) -> None:
        if thread in self._waiting:  # else it already continues
            self._waiting.remove(thread)
            thread.resume()


def run(process: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    """The simulated `loop.run_in_executor`."""
    future: asyncio.Future[Any] = process.create_future()

    def work() -> None:
        try:
            result = function(*args)
        except Killed:
            raise
        except BaseException as error:
            process.call_soon(_settle, future.set_exception, future, error)
        else:
            process.call_soon(_settle, future.set_result, future, result)

    SimulatedThread(work).start()
    return future


def _settle(settle: Callable[[Any], None], future: asyncio.Future[Any], what: Any) -> None:
    if not future.done():
        settle(what)


def current() -> SimulatedThread | None:
    """The running thread; None for that of an event loop."""
    return getattr(_here, "thread", None)


def running_process() -> Any:
    """The process that creates a thread."""
    thread = current()
    return asyncio.get_running_loop() if thread is None else thread.process
