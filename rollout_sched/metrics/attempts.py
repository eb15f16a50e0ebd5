"""Which attempts are in flight, and where: a fold in which other folds look attempts up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from typing import Any, NamedTuple

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import (
    InstanceJoined,
    InstanceLost,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    Restored,
    TurnFinished,
    WeightsUpdated,
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


# ------------------------------------------------------------------------------------------
# Where and when each attempt ran: its place on its instance, its start and its end.

Ended = RequestFinished | RequestInterrupted | TurnFinished | RequestFailed

#: How an attempt ended.
OUTCOMES = ("finished", "interrupted", "turn finished", "failed", "lost", "still running")

_OUTCOME_OF: dict[type[Any], str] = {
    RequestFinished: "finished",
    RequestInterrupted: "interrupted",
    TurnFinished: "turn finished",
    RequestFailed: "failed",
}


class Running(NamedTuple):
    """An attempt in flight: `place` is the lowest free one on its instance, from 1; `version` is
    the version of the instance at dispatch."""

    start_s: float
    dispatch: Dispatch
    version: int
    place: int


class AttemptSpan(NamedTuple):
    """What an attempt made under one version; times in seconds, `tokens` 0 if unknown."""

    start_s: float
    length_s: float
    version: int
    tokens: int


class Closed(NamedTuple):
    """An attempt that is over. `outcome` is one of OUTCOMES; `reason` explains a failure."""

    attempt: Running
    end_s: float
    spans: tuple[AttemptSpan, ...]
    outcome: str
    reason: str = ""


class _Places:
    """Gives out the lowest free place."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._most = 0

    def take(self) -> int:
        if self._free:
            return heappop(self._free)
        self._most += 1
        return self._most

    def leave(self, place: int) -> None:
        heappush(self._free, place)


class AttemptSpans:
    """Folds dispatches and answers; `take` is called with every attempt that is over.

    running  attempts in flight, by id

    Run it before the folds that use it.
    """

    def __init__(self, take: Callable[[Closed], None]) -> None:
        self.running: dict[int, Running] = {}
        self._take = take
        self._places: dict[str, _Places] = {}
        self._versions: dict[str, int] = {}

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            Dispatch: self._begun,
            RequestFinished: self._ended,
            RequestInterrupted: self._ended,
            TurnFinished: self._ended,
            RequestFailed: self._ended,
            InstanceJoined: self._joined,
            InstanceLost: self._lost,
            WeightsUpdated: self._updated,
        }

    def end(self, end_s: float) -> None:
        """End all attempts that still run at `end_s`."""
        for attempt in list(self.running):
            self._close(attempt, end_s, (), "still running")

    def _begun(self, now: float, action: Dispatch) -> None:
        place = self._places.setdefault(action.instance, _Places()).take()
        version = self._versions.get(action.instance, 0)
        self.running[action.attempt] = Running(now, action, version, place)

    def _ended(self, now: float, event: Ended) -> None:
        running = self.running.get(event.attempt)
        if running is None:
            return
        outcome = _OUTCOME_OF[type(event)]
        if isinstance(event, RequestFailed):
            self._close(event.attempt, now, (), outcome, event.reason)
        else:
            made = event.spans or ((running.version, event.tokens),)
            self._close(event.attempt, now, made, outcome)

    def _joined(self, now: float, event: InstanceJoined) -> None:
        self._gone(now, event.instance, "it was restarted")
        self._versions[event.instance] = event.version

    def _lost(self, now: float, event: InstanceLost) -> None:
        self._gone(now, event.instance, event.reason)

    def _gone(self, now: float, instance: str, reason: str) -> None:
        gone = [n for n, one in self.running.items() if one.dispatch.instance == instance]
        for attempt in gone:
            self._close(attempt, now, (), "lost", reason)

    def _updated(self, now: float, event: WeightsUpdated) -> None:
        self._versions[event.instance] = event.version

    def _close(
        self,
        attempt: int,
        now: float,
        made: Iterable[tuple[int, int]],
        outcome: str,
        reason: str = "",
    ) -> None:
        running = self.running.pop(attempt)
        self._places[running.dispatch.instance].leave(running.place)
        self._take(Closed(running, now, tuple(_spans(running, now, made)), outcome, reason))


def _spans(running: Running, now: float, made: Iterable[tuple[int, int]]) -> Iterator[AttemptSpan]:
    """The time of an attempt, divided by tokens: the moment of a version change is unknown."""
    some = [(version, tokens) for version, tokens in made if tokens]
    if not some:
        yield AttemptSpan(running.start_s, now - running.start_s, running.version, 0)
        return
    each_s = (now - running.start_s) / sum(tokens for _, tokens in some)
    start_s = running.start_s
    for version, tokens in some:
        yield AttemptSpan(start_s, tokens * each_s, version, tokens)
        start_s += tokens * each_s
