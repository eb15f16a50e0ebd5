"""Gathers the attempts of a live run: those in flight and the last ended ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from rollout_sched.core.actions import Dispatch
from rollout_sched.metrics.attempt_spans import OUTCOMES, AttemptSpan, AttemptSpans, Closed
from rollout_sched.metrics.fold import Fold, Handler
from rollout_sched.metrics.waits import Waits

#: How many ended attempts are kept.
ENDED = 10_000

_RUNNING = OUTCOMES.index("still running")


class DrawnAttempt(msgspec.Struct, frozen=True, array_like=True):
    """An attempt as a page draws it. group: for a request without a group its own name, with
    `index` -1; since, cause, outcome: indices into SINCE, CAUSES and OUTCOMES."""

    attempt: int
    group: str
    index: int
    instance: str
    place: int
    start: float
    version: int
    context: int
    before: int
    turn: int
    waited: float
    since: int
    cause: int
    outcome: int = _RUNNING
    spans: tuple[AttemptSpan, ...] = ()


class LiveAttempts:
    """Folds attempts; `serial` counts the starts and ends of attempts."""

    def __init__(self) -> None:
        self.serial = 0
        self._spans = AttemptSpans(self._closed)
        self._waits = Waits()
        self._running: dict[int, tuple[int, DrawnAttempt]] = {}
        self._ended: deque[tuple[int, DrawnAttempt]] = deque(maxlen=ENDED)

    @property
    def folds(self) -> tuple[Fold, ...]:
        """All folds, in the order in which they must run."""
        return self._spans, self._waits, self

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {Dispatch: self._dispatched}

    def since(self, serial: int) -> list[DrawnAttempt]:
        """The attempts that have started or ended after `serial`."""
        ended = [attempt for at, attempt in self._ended if at > serial]
        running = [attempt for at, attempt in self._running.values() if at > serial]
        return [*ended, *running]

    def _dispatched(self, now: float, action: Dispatch) -> None:
        running, wait = self._spans.running[action.attempt], self._waits.last
        self.serial += 1
        begun = DrawnAttempt(
            action.attempt,
            action.group or action.request,
            action.index if action.group else -1,
            action.instance,
            running.place,
            now,
            running.version,
            action.context_tokens,
            action.response_tokens,
            action.turn,
            wait.seconds,
            wait.since,
            wait.cause,
        )
        self._running[action.attempt] = self.serial, begun

    def _closed(self, closed: Closed) -> None:
        self._waits.closed(closed)
        _, attempt = self._running.pop(closed.attempt.dispatch.attempt)
        self.serial += 1
        outcome = OUTCOMES.index(closed.outcome)
        ended = msgspec.structs.replace(attempt, outcome=outcome, spans=closed.spans)
        self._ended.append((self.serial, ended))
