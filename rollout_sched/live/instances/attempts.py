"""The running attempts of a fleet, as the supervisors of its instances see and stop them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from rollout_sched.core.model.actions import Dispatch


class InFlight(ABC):
    """A running attempt, from its order to its end.

    begun    when it was sent, in seconds of the loop's clock
    stopped  whether the supervisor of its instance has stopped it
    timer    gives it up after a time; None: it has no limit
    """

    __slots__ = ("_ended", "_open", "begun", "dispatch", "stopped", "timer")

    def __init__(self, dispatch: Dispatch, begun: float) -> None:
        self.dispatch = dispatch
        self.begun = begun
        self.stopped = False
        self.timer: asyncio.TimerHandle | None = None
        self._open = True
        self._ended: asyncio.Future[None] | None = None

    @property
    @abstractmethod
    def streamed(self) -> int:
        """Tokens known to have come on its stream. Raises what its payload raises."""

    @property
    @abstractmethod
    def reads(self) -> bool:
        """Whether it was sent and its stream is being read."""

    def ended(self) -> asyncio.Future[None]:
        """Done when nothing more will be reported about it."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
            if not self._open:
                self._ended.set_result(None)
        return self._ended

    def end(self) -> None:
        """Nothing more will be reported about it."""
        self._open = False
        if self.timer is not None:
            self.timer.cancel()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


A = TypeVar("A", bound=InFlight)


class AttemptIndex(Generic[A]):
    """Running attempts by number and by instance."""

    def __init__(self) -> None:
        self._running: dict[int, A] = {}
        self._by_instance: dict[str, dict[int, A]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, attempt: int) -> bool:
        return attempt in self._running

    def get(self, attempt: int) -> A | None:
        return self._running.get(attempt)

    def every(self) -> list[A]:
        return list(self._running.values())

    def on(self, instance: str) -> list[A]:
        """The attempts on an instance, in the order of dispatch."""
        return list(self._by_instance.get(instance, {}).values())

    def add(self, running: A) -> None:
        dispatch = running.dispatch
        self._running[dispatch.attempt] = running
        self._by_instance.setdefault(dispatch.instance, {})[dispatch.attempt] = running

    def take(self, running: A) -> bool:
        """Remove an attempt. False if it was removed before: this is not its first end."""
        dispatch = running.dispatch
        if self._running.pop(dispatch.attempt, None) is None:
            return False
        there = self._by_instance[dispatch.instance]
        del there[dispatch.attempt]
        if not there:
            del self._by_instance[dispatch.instance]
        running.end()
        return True


class FleetAttempts(Protocol):
    """The running attempts of all fronts, in this process and in others."""

    def on(self, instance: str) -> Sequence[InFlight]: ...

    async def answered(self, instance: str) -> None:
        """Wait after a pause that aborts, until every attempt there has ended."""

    def stop(self, attempt: int, reason: str) -> None:
        """Abort an attempt that may never answer; its request continues from the tokens it has."""

    def reject_streamed(self, attempt: int) -> None:
        """Fail an attempt whose stream has brought tokens: they may be of unknown weights."""

    def lose(self, instance: str, tell: Callable[[], None]) -> None:
        """The instance is gone: keep what streams brought, then call `tell`, which reports the loss
        to the scheduler."""
