"""The event jump: between two events the batch does not change, so any number of decode steps is
one closed formula (see decode_batch). No work is done per token or per running attempt.
"""

from __future__ import annotations

from typing import Final

from rollout_sched.simulators.instance.inbox import Inbox
from rollout_sched.simulators.instance.step_scheduler import StepScheduler

INFINITY: Final = float("inf")
NO_STEP: Final = -1


class EventJump:
    """How many decode steps can be made at once from a boundary, and when they end.

    steps, end  as last planned

    The plan is kept until something changes: an input, an attempt that leaves, a step that needs a
    decision. Code that changes something calls `forget`.
    """

    __slots__ = ("_at", "_inbox", "_scheduler", "_step", "end", "steps")

    def __init__(self, scheduler: StepScheduler, inbox: Inbox) -> None:
        self.steps = 0
        self.end = 0.0
        self._scheduler = scheduler
        self._inbox = inbox
        self._step = NO_STEP  # the boundary of the plan ...
        self._at = 0.0  # ... and its time

    def forget(self) -> None:
        self._step = NO_STEP

    def plan(self, step: int, at: float) -> bool:
        """Plan from the boundary `step` at time `at`: the last one, or the end of the step in
        progress. False if the next step needs a decision, or there is none."""
        if step == self._step and at == self._at:
            return True
        scheduler = self._scheduler
        if not scheduler.can_run() or scheduler.must_decide(step):
            return False
        batch = scheduler.batch
        steps = batch.steps_that_fit(step, batch.next_end() - step, scheduler.kv.free)
        if self._inbox.due < INFINITY:
            steps = min(steps, self._steps_to_input(step, at))
        self.steps = steps
        self.end = at + scheduler.time.jump(steps, batch.count, batch.context(step))
        self._step, self._at = step, at
        return True

    def _steps_to_input(self, step: int, at: float) -> int:
        """Steps up to the first boundary at or after the next input. The inverse of the formula is
        only a guess; the comparison uses the same sums that become the boundaries."""
        arrives, time, batch = self._inbox.due, self._scheduler.time, self._scheduler.batch
        count, context = batch.count, batch.context(step)
        steps = max(1, time.steps_within(arrives - at, count, context))
        while at + time.jump(steps, count, context) < arrives:
            steps += 1
        while steps > 1 and at + time.jump(steps - 1, count, context) >= arrives:
            steps -= 1
        return steps

    def steps_by(self, step: int, at: float, now: float) -> int:
        """Whole decode steps of the jump from this boundary that are finished by now."""
        if now <= at:
            return 0
        if not self.plan(step, at):
            return 0
        if now >= self.end:
            return self.steps
        batch = self._scheduler.batch
        return self._scheduler.time.steps_within(now - at, batch.count, batch.context(step))

    def end_of(self, wanted: int, step: int, at: float) -> float:
        """When the step `wanted` ends, if it is part of the jump from this boundary; else inf."""
        if not self.plan(step, at) or wanted - step > self.steps:
            return INFINITY
        if wanted - step == self.steps:
            return self.end
        batch = self._scheduler.batch
        return at + self._scheduler.time.jump(wanted - step, batch.count, batch.context(step))
