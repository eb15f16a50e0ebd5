"""The page of a live run; it is empty until the gateway sends its state."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollout_sched.core import SchedulerView
from rollout_sched.core.model.actions import Action, Deliver, Discard, Dispatch, Pause
from rollout_sched.core.model.events import (
    Event,
    InstanceJoined,
    InstanceLost,
    RequestFailed,
    RequestFinished,
    Restored,
    WeightsPublished,
    WeightsUpdated,
    Woke,
)
from rollout_sched.metrics import Step
from rollout_sched.metrics.attempts import OUTCOMES, AttemptSpan, AttemptSpans, Closed
from rollout_sched.metrics.fold import Fold, Folded, Handler
from rollout_sched.metrics.waits import CAUSES, SINCE, Waits
from rollout_sched.page.assembly import page


def live_page() -> bytes:
    """A page that asks for the administrator's key and then requests the state from its server."""
    words = {"since": SINCE, "causes": CAUSES, "outcomes": OUTCOMES}
    return page("rollout_sched, live", "live", {"words": words}, connects=True)


# ------------------------------------------------------------------------------------------
# Gathers the attempts of a live run: those in flight and the last ended ones.

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


#: How many changes are kept.
CHANGES = 50


class LoggedChange(NamedTuple):
    """level: "info", "warning" or "error"; kind: a word for the type of change."""

    at: float
    level: str
    kind: str
    text: str


class ChangeLog:
    """Folds the notable changes; `last` has the latest ones, the newest at the end."""

    def __init__(self) -> None:
        self.last: deque[LoggedChange] = deque(maxlen=CHANGES)

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            Deliver: self._delivered,
            InstanceJoined: self._joined,
            InstanceLost: self._lost,
            Pause: self._paused,
            RequestFailed: self._failed,
            WeightsPublished: self._published,
            WeightsUpdated: self._updated,
            Restored: self._restored,
        }

    def _note(self, now: float, level: str, kind: str, text: str) -> None:
        self.last.append(LoggedChange(now, level, kind, text))

    def _joined(self, now: float, event: InstanceJoined) -> None:
        self._note(now, "info", "joined", f"{event.instance} joined with version {event.version}")

    def _lost(self, now: float, event: InstanceLost) -> None:
        if event.requested:
            self._note(now, "info", "left", f"{event.instance} was {event.reason}")
        else:
            self._note(now, "error", "lost", f"{event.instance} was lost: {event.reason}")

    def _paused(self, now: float, action: Pause) -> None:
        self._note(now, "info", "paused", f"{action.instance} is paused ({action.mode})")

    def _published(self, now: float, event: WeightsPublished) -> None:
        self._note(now, "info", "published", f"version {event.version} published")

    def _updated(self, now: float, event: WeightsUpdated) -> None:
        self._note(now, "info", "updated", f"{event.instance} has version {event.version}")

    def _restored(self, now: float, event: Restored) -> None:
        self._note(now, "warning", "restarted", "the scheduler continues an earlier run")

    def _failed(self, now: float, event: RequestFailed) -> None:
        self._note(
            now, "warning", "failed", f"an attempt of {event.request} failed: {event.reason}"
        )

    def _delivered(self, now: float, action: Deliver) -> None:
        if action.last:
            self._note(now, "info", "delivered", f"batch {action.batch} delivered")


#: How many of the last steps are reported.
STEPS = 20

#: The fields of a step that are reported as they are.
_TAIL = ("t50_s", "t90_s", "t99_s")
_REPORTED = (
    *("version", "end_s", "span_s", "rollout_s", "trainer_wait_s"),
    *("samples", "tokens", "discarded_tokens", "max_staleness", "idle_bubble"),
)


def last_steps(delivered: Sequence[Step]) -> list[dict[str, Any]]:
    """The last delivered steps, as the page draws them; a step seen in part has no tail."""
    return [
        {
            **{name: getattr(step, name) for name in _REPORTED},
            **{name: None if step.partial else getattr(step, name) for name in _TAIL},
            "idle_by_cause": _shares(step.idle_s, step.capacity_s),
        }
        for step in delivered[-STEPS:]
    ]


class LiveFold:
    """Gathers attempts, staleness, waste and changes of a live run while it is watched.
    Starts in the middle of a run, with the attempts that are in flight then.

    began_s    when the fold started; `step_began_s`: when the current step started, but not before
               `began_s`
    finished   attempts of the current step that finished by themselves
    staleness  delivered samples by staleness in versions; waste: discarded tokens by reason
    """

    def __init__(self, view: SchedulerView, now: float) -> None:
        self.began_s = self.step_began_s = now
        self.finished = 0
        self.staleness: Counter[int] = Counter()
        self.waste: Counter[str] = Counter()
        self.attempts = LiveAttempts()
        self.changes = ChangeLog()
        self._folded = Folded(*self.attempts.folds, self)
        for event, actions in _as_it_is(view):
            self.observe(now, event, actions)
        self._folded = Folded(*self.attempts.folds, self, self.changes)

    def observe(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        """Take an event and the actions of the scheduler."""
        self._folded.observe(now, event, actions)

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            RequestFinished: self._finished,
            Deliver: self._delivered,
            Discard: self._discarded,
        }

    def _finished(self, now: float, event: RequestFinished) -> None:
        self.finished += 1

    def _discarded(self, now: float, action: Discard) -> None:
        self.waste[action.reason] += action.tokens

    def _delivered(self, now: float, action: Deliver) -> None:
        self.staleness.update(sample.staleness for sample in action.samples)
        if action.last:
            self.step_began_s, self.finished = now, 0


def _as_it_is(view: SchedulerView) -> Iterator[tuple[Event, list[Action]]]:
    """Events and actions that dispatch all attempts in flight, as if just now."""
    for instance in view.instances:
        yield InstanceJoined(instance.id, instance.slots, instance.kv_tokens, instance.version), []
        dispatches: list[Action] = []
        for attempt in instance.attempts.values():
            request = attempt.request
            dispatches.append(
                Dispatch(
                    request.id,
                    attempt.id,
                    instance.id,
                    attempt.context_tokens,
                    attempt.max_new_tokens,
                    attempt.version,
                    request.response_tokens,
                    turn=request.turn,
                    group="" if request.group is None else request.group.id,
                    index=request.index,
                )
            )
        yield Woke(), dispatches


def _shares(spent_s: Mapping[str, float], capacity_s: float) -> dict[str, float]:
    return {cause: spent / capacity_s for cause, spent in spent_s.items() if capacity_s}
