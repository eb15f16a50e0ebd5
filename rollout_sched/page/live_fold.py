"""Gathers attempts, steps, staleness, waste and changes of a live run while it is watched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollout_sched.core.actions import Action, Deliver, Discard, Dispatch
from rollout_sched.core.events import Event, InstanceJoined, RequestFinished, Woke
from rollout_sched.core.view import SchedulerView
from rollout_sched.metrics.fold import Handler
from rollout_sched.metrics.folded import Folded
from rollout_sched.metrics.live_steps import LiveSteps
from rollout_sched.page.changes import ChangeLog
from rollout_sched.page.live_attempts import LiveAttempts

#: How many of the last steps are reported.
STEPS = 20

#: After so many steps a new fold should replace this one, because it keeps data of every step.
MOST_STEPS = 1000


class LiveFold:
    """Starts in the middle of a run, with the attempts that are in flight then.

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
        self._steps = LiveSteps()
        self._steps.begin(now)
        self._folded = Folded(*self.attempts.folds, self)
        for event, actions in _as_it_is(view):
            self.observe(now, event, actions)
        self._folded = Folded(*self.attempts.folds, self, self.changes)

    def observe(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        """Take an event and the actions of the scheduler."""
        self._folded.observe(now, event, actions)
        self._steps.observe(now, event, actions)

    @property
    def is_full(self) -> bool:
        return len(self._steps.delivered) >= MOST_STEPS

    def steps(self) -> list[dict[str, Any]]:
        """The last delivered steps."""
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
            for step in self._steps.delivered[-STEPS:]
        ]

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
