"""The blocking client: the same calls for a trainer without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from rollout_sched.client.loop_thread import LoopThread
from rollout_sched.client.rollout_scheduler import RolloutScheduler
from rollout_sched.live.trainer.samples import Batch

P = ParamSpec("P")
R = TypeVar("R")


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
    give_back = _blocking(RolloutScheduler.give_back)
    add_instance = _blocking(RolloutScheduler.add_instance)
    remove_instance = _blocking(RolloutScheduler.remove_instance)
    state = _blocking(RolloutScheduler.state)

    def acknowledge(self, batch: int) -> None:
        """See `RolloutScheduler.acknowledge`."""
        self._rollouts.acknowledge(batch)

    def start(self, work: Callable[[RolloutScheduler], Coroutine[Any, Any, R]]) -> Future[R]:
        """Run `work` in the background, in the thread of the event loop. `work` awaits the calls of
        the scheduler that it is given. Cancel the future to stop it."""
        return self._thread.start(work(self._rollouts))

    def batches(self) -> Iterator[Batch]:
        """See `RolloutScheduler.batches`."""
        while (batch := self.next_batch()) is not None:
            yield batch

    def parts(self) -> Iterator[Batch]:
        """See `RolloutScheduler.parts`."""
        while (part := self.next_batch(parts=True)) is not None:
            yield part
