"""Running attempts at fronts in other processes, as the scheduler's host sees them."""

from __future__ import annotations

import asyncio

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.events import RequestFinished, RequestInterrupted, TurnFinished


class RemoteAttempt:
    """A dispatch that a front carries out (`live.attempts.InFlight`).

    begun     when it was ordered, in seconds of the host's clock
    reads     whether it was sent to its front
    streamed  tokens of its stream that the host knows of
    answer    its end as the front reported it; None before
    """

    def __init__(self, dispatch: Dispatch, begun: float) -> None:
        self.dispatch = dispatch
        self.begun = begun
        self.stopped = False
        self.streamed = 0
        self.reads = False
        self.answer: RequestFinished | TurnFinished | RequestInterrupted | None = None
        self._ended: asyncio.Future[None] | None = None
        self._open = True

    def ended(self) -> asyncio.Future[None]:
        """Done when nothing more will be reported about it."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
            if not self._open:
                self._ended.set_result(None)
        return self._ended

    def end(self) -> None:
        self._open = False
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class RemoteAttempts:
    """The attempts of one front, by number and by instance."""

    def __init__(self) -> None:
        self._all: dict[int, RemoteAttempt] = {}
        self._by_instance: dict[str, dict[int, RemoteAttempt]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def get(self, attempt: int) -> RemoteAttempt | None:
        return self._all.get(attempt)

    def every(self) -> list[RemoteAttempt]:
        return list(self._all.values())

    def on(self, instance: str) -> list[RemoteAttempt]:
        """In the order of dispatch."""
        return list(self._by_instance.get(instance, {}).values())

    def add(self, attempt: RemoteAttempt) -> None:
        dispatch = attempt.dispatch
        self._all[dispatch.attempt] = attempt
        self._by_instance.setdefault(dispatch.instance, {})[dispatch.attempt] = attempt

    def take(self, number: int) -> RemoteAttempt | None:
        """Remove an ended attempt; None if it was removed before."""
        attempt = self._all.pop(number, None)
        if attempt is None:
            return None
        there = self._by_instance[attempt.dispatch.instance]
        del there[number]
        if not there:
            del self._by_instance[attempt.dispatch.instance]
        attempt.end()
        return attempt
