"""The blocking client: the same calls for a trainer without an event loop, on one in a thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from rollout_sched import process as event_loop
from rollout_sched.client.rollout_scheduler import RolloutScheduler
from rollout_sched.core.errors import CallerError
from rollout_sched.live.trainer.samples import Batch

P = ParamSpec("P")
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


def _blocking(
    method: Callable[Concatenate[RolloutScheduler, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[BlockingRollouts, P], R]:
    """The blocking form of a method; it raises what the method raises."""

    def call(self: BlockingRollouts, /, *args: P.args, **kwargs: P.kwargs) -> R:
        bound: Callable[P, Coroutine[Any, Any, R]] = getattr(self._rollouts, method.__name__)
        return self._thread.run(bound(*args, **kwargs))

    update_wrapper(call, method)
    return call


class BlockingRollouts:
    """A `RolloutScheduler` whose event loop runs in its own thread; use it in a `with` block.

    Tools, weight loaders and a borrower are called in that thread and must not call this object.
    """

    def __init__(self, rollouts: RolloutScheduler) -> None:
        self._rollouts = rollouts
        self._thread = LoopThread()

    def __enter__(self) -> Self:
        self._thread.open("rollouts")
        try:
            self._thread.run(self._rollouts.__aenter__())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._thread.run(self._rollouts.__aexit__(*error))
        finally:
            self._thread.stop()

    submit = _blocking(RolloutScheduler.submit)
    close_submissions = _blocking(RolloutScheduler.close_submissions)
    next_batch = _blocking(RolloutScheduler.next_batch)
    publish_weights = _blocking(RolloutScheduler.publish_weights)
    report_mismatch = _blocking(RolloutScheduler.report_mismatch)
    return_instance = _blocking(RolloutScheduler.return_instance)
    add_instance = _blocking(RolloutScheduler.add_instance)
    remove_instance = _blocking(RolloutScheduler.remove_instance)
    state = _blocking(RolloutScheduler.state)

    def acknowledge(self, batch: int) -> None:
        """Continue from a checkpoint that was trained up to this batch number."""
        self._rollouts.acknowledge(batch)

    def start(self, work: Callable[[RolloutScheduler], Coroutine[Any, Any, R]]) -> Future[R]:
        """Run `work` in the background, in the thread of the event loop. `work` awaits the calls of
        the scheduler that it is given. Cancel the future to stop it."""
        return self._thread.start(work(self._rollouts))

    def batches(self) -> Iterator[Batch]:
        """Yields each batch once, until submissions are closed and nothing is left."""
        while (batch := self.next_batch()) is not None:
            yield batch

    def parts(self) -> Iterator[Batch]:
        """Yields the batches in parts, as their groups complete (`RolloutScheduler.parts`)."""
        while (part := self.next_batch(parts=True)) is not None:
            yield part
