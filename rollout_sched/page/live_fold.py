"""What a live run has done since somebody looks: attempts, steps, staleness, waste, changes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from rollout_sched.core.actions import Action, Deliver, Discard, Dispatch, Pause
from rollout_sched.core.events import (
    Event,
    InstanceJoined,
    InstanceLost,
    Restored,
    Retuned,
    WeightsPublished,
    WeightsUpdated,
    Woke,
)
from rollout_sched.core.view import SchedulerView
from rollout_sched.metrics import Metrics
from rollout_sched.metrics.attempt_spans import OUTCOMES, AttemptSpans, Closed, Span
from rollout_sched.metrics.fold import Handler
from rollout_sched.metrics.folded import Folded
from rollout_sched.metrics.waits import Waits

#: Attempts that are over, changes and steps that are remembered.
ENDED = 10_000
CHANGES = 50
STEPS = 20

#: Steps after which it is better to look anew, for what is known of each is kept.
MOST_STEPS = 1000

_RUNNING = OUTCOMES.index("still running")


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """An attempt as a page draws it. group: the request's own name where it has no group, and
    `index` is -1 then; since, cause, outcome: places in SINCE, CAUSES and OUTCOMES."""

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
    spans: tuple[Span, ...] = ()


class Change(NamedTuple):
    """level: "info", "warning" or "error"; kind: a word for what it is about."""

    at: float
    level: str
    kind: str
    text: str


class LiveFold:
    """Begins in the middle of a run: with what is in flight by then.

    serial     counts what has begun or ended
    began_s    when it began to look; `step_began_s` the present step, or that if it came later
    finished   samples that ended in the present step
    staleness  delivered samples by versions; waste: tokens thrown away by reason
    """

    def __init__(self, view: SchedulerView, now: float) -> None:
        self.serial = 0
        self.began_s = self.step_began_s = now
        self.finished = 0
        self.staleness: Counter[int] = Counter()
        self.waste: Counter[str] = Counter()
        self.changes: deque[Change] = deque(maxlen=CHANGES)
        self.metrics = Metrics(max((each.slots for each in view.instances), default=1))
        self._spans = AttemptSpans(self._closed)
        self._waits = Waits()
        self._running: dict[int, tuple[int, Attempt]] = {}
        self._ended: deque[tuple[int, Attempt]] = deque(maxlen=ENDED)
        self._folded = Folded(self._spans, self._waits, self)
        self._begin(view, now)

    def observe(self, now: float, event: Event, actions: Iterable[Action]) -> None:
        """Take what has happened and what the scheduler answered."""
        self._folded.observe(now, event, actions)
        self.metrics.observe(now, event, actions)

    @property
    def is_full(self) -> bool:
        return len(self.metrics.steps) >= MOST_STEPS

    def attempts(self, after: int) -> list[Attempt]:
        """Those that have begun or ended after that serial."""
        ended = [attempt for serial, attempt in self._ended if serial > after]
        running = [attempt for serial, attempt in self._running.values() if serial > after]
        return [*ended, *running]

    def steps(self) -> list[dict[str, Any]]:
        """The last that were delivered."""
        return [
            {
                "version": step.version,
                "end_s": step.end_s,
                "span_s": step.span_s,
                "rollout_s": step.rollout_s,
                "t50_s": step.t50_s,
                "t90_s": step.t90_s,
                "t99_s": step.t99_s,
                "trainer_wait_s": step.trainer_wait_s,
                "samples": step.samples,
                "tokens": step.tokens,
                "discarded_tokens": step.discarded_tokens,
                "max_staleness": step.max_staleness,
                "idle_bubble": step.idle_bubble,
                "idle_by_cause": _shares(step.idle_s, step.capacity_s),
            }
            for step in self.metrics.steps[-STEPS:]
        ]

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            Dispatch: self._dispatched,
            Deliver: self._delivered,
            Discard: self._discarded,
            InstanceJoined: self._joined,
            InstanceLost: self._lost,
            Pause: self._paused,
            WeightsPublished: self._published,
            WeightsUpdated: self._updated,
            Restored: self._restored,
            Retuned: self._retuned,
        }

    def _begin(self, view: SchedulerView, now: float) -> None:
        for event, actions in _as_it_is(view):
            self.observe(now, event, actions)
        self.changes.clear()

    # -- attempts --------------------------------------------------------------------------

    def _dispatched(self, now: float, action: Dispatch) -> None:
        running, wait = self._spans.running[action.attempt], self._waits.last
        self.serial += 1
        self._running[action.attempt] = (
            self.serial,
            Attempt(
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
            ),
        )

    def _closed(self, closed: Closed) -> None:
        self._waits.closed(closed)
        _, attempt = self._running.pop(closed.attempt.dispatch.attempt)
        self.serial += 1
        self.finished += closed.outcome == "finished"
        outcome = OUTCOMES.index(closed.outcome)
        self._ended.append(
            (self.serial, msgspec.structs.replace(attempt, outcome=outcome, spans=closed.spans))
        )
        if closed.outcome == "failed":
            on = attempt.instance
            self._change(
                closed.end_s, "warning", "failed", f"an attempt on {on} failed: {closed.reason}"
            )

    def _discarded(self, now: float, action: Discard) -> None:
        self.waste[action.reason] += action.tokens

    def _delivered(self, now: float, action: Deliver) -> None:
        self.staleness.update(sample.staleness for sample in action.samples)
        if action.last:
            self._change(now, "info", "delivered", f"batch {action.batch} delivered")
            self.step_began_s, self.finished = now, 0

    # -- the fleet -------------------------------------------------------------------------

    def _change(self, now: float, level: str, kind: str, text: str) -> None:
        self.changes.append(Change(now, level, kind, text))

    def _joined(self, now: float, event: InstanceJoined) -> None:
        self._change(now, "info", "joined", f"{event.instance} joined with version {event.version}")

    def _lost(self, now: float, event: InstanceLost) -> None:
        if event.asked:
            self._change(now, "info", "left", f"{event.instance} was {event.reason}")
        else:
            self._change(now, "error", "lost", f"{event.instance} was lost: {event.reason}")

    def _paused(self, now: float, action: Pause) -> None:
        self._change(now, "info", "paused", f"{action.instance} is paused ({action.mode})")

    def _published(self, now: float, event: WeightsPublished) -> None:
        self._change(now, "info", "published", f"version {event.version} published")

    def _updated(self, now: float, event: WeightsUpdated) -> None:
        self._change(now, "info", "updated", f"{event.instance} has version {event.version}")

    def _restored(self, now: float, event: Restored) -> None:
        self._change(now, "warning", "restarted", "an earlier run was taken up again")

    def _retuned(self, now: float, event: Retuned) -> None:
        said = ", ".join(
            f"{role}.{name} = {value}"
            for role, parameters in event.parameters.items()
            for name, value in parameters.items()
        )
        self._change(now, "info", "retuned", f"the policy has other parameters: {said}")


def _as_it_is(view: SchedulerView) -> Iterator[tuple[Event, list[Action]]]:
    """What is in flight, as if it had been dispatched just now."""
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
