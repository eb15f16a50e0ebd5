"""Which attempts are in flight, and where: a fold in which other folds look attempts up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.events import (
    InstanceJoined,
    InstanceLost,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    Restored,
    TurnFinished,
)
from rollout_sched.metrics.fold import Handler


class AttemptIndex:
    """Attempts that were dispatched and have not ended, by id.

    closed  the attempt that the current event has ended, or None if the event answers an attempt
            that is not in flight (any more)

    Run it before the folds that use it. Attempts on an instance that is lost or joins again, and
    attempts of an earlier scheduler, are no longer in flight.
    """

    __slots__ = ("closed", "open")

    def __init__(self) -> None:
        self.open: dict[int, Dispatch] = {}
        self.closed: Dispatch | None = None

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            Dispatch: self._dispatched,
            RequestFinished: self._answered,
            RequestInterrupted: self._answered,
            RequestFailed: self._answered,
            TurnFinished: self._answered,
            InstanceJoined: self._gone,
            InstanceLost: self._gone,
            Restored: self._restored,
        }

    def _dispatched(self, now: float, action: Dispatch) -> None:
        self.open[action.attempt] = action

    def _answered(
        self, now: float, event: RequestFinished | RequestInterrupted | RequestFailed | TurnFinished
    ) -> None:
        self.closed = self.open.pop(event.attempt, None)

    def _gone(self, now: float, event: InstanceJoined | InstanceLost) -> None:
        lost = [n for n, one in self.open.items() if one.instance == event.instance]
        for number in lost:
            del self.open[number]

    def _restored(self, now: float, event: Restored) -> None:
        self.open.clear()
