"""For a trainer without an event loop: the same calls, each of which returns when it is done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from rollout_sched import event_loop
from rollout_sched.client.rollout_scheduler import RolloutScheduler
from rollout_sched.core.errors import CallerError
from rollout_sched.live.samples import Batch

P = ParamSpec("P")
R = TypeVar("R")


def _blocking(
    method: Callable[Concatenate[RolloutScheduler, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[BlockingRollouts, P], R]:
    """The same call, waited for; what it raises is raised here."""

    def call(self: BlockingRollouts, /, *args: P.args, **kwargs: P.kwargs) -> R:
        bound: Callable[P, Coroutine[Any, Any, R]] = getattr(self._rollouts, method.__name__)
        return self._thread.run(bound(*args, **kwargs))

    update_wrapper(call, method)
    return call


class BlockingRollouts:
    """A `RolloutScheduler` whose event loop runs in a thread of its own; to be used as `with`.

    Tools, weight loaders and a borrower are called in that thread, and cannot call back here.
    """

    def __init__(self, rollouts: RolloutScheduler) -> None:
        self._rollouts = rollouts
        self._thread = _LoopThread()

    def __enter__(self) -> Self:
        self._thread.start()
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
    give_back = _blocking(RolloutScheduler.give_back)
    add_instance = _blocking(RolloutScheduler.add_instance)
    remove_instance = _blocking(RolloutScheduler.remove_instance)
    state = _blocking(RolloutScheduler.state)

    def batches(self) -> Iterator[Batch]:
        """See `RolloutScheduler.batches`."""
        while (batch := self.next_batch()) is not None:
            yield batch

    def parts(self) -> Iterator[Batch]:
        """See `RolloutScheduler.parts`."""
        while (part := self.next_batch(parts=True)) is not None:
            yield part


class _LoopThread:
    """An event loop in a thread. It ends with the program, should nobody stop it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event
        self._thread: threading.Thread

    def start(self) -> None:
        running = threading.Event()

        async def live() -> None:
            self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
            running.set()
            await self._end.wait()

        self._thread = threading.Thread(
            target=lambda: event_loop.run(live()), name="rollouts", daemon=True
        )
        self._thread.start()
        running.wait()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """What it returns or raises. A wait that is broken off, as by Ctrl-C, cancels it."""
        if self._loop is None or threading.current_thread() is self._thread:
            work.close()
            raise CallerError(
                "use it as `with`: its event loop does not run"
                if self._loop is None
                else "a tool or a loader runs in the event loop that this call waits for; give it "
                "what it needs before"
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        assert self._loop is not None  # started
        loop, self._loop = self._loop, None
        loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
