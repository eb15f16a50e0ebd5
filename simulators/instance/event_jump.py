"""The event jump: between two events the batch stays as it is, so any number of decode steps is
one closed formula (see decode_batch). Nothing is done per token or per running attempt.
"""

from __future__ import annotations

import msgspec

from rollout_sched.simulators.instance.inbox import Inbox
from rollout_sched.simulators.instance.step_scheduler import StepScheduler

INFINITY = float("inf")


class Jump(msgspec.Struct, frozen=True, gc=False):
    """So many decode steps from the boundary `step`, which is at `at`, until `end`."""

    step: int
    at: float
    steps: int
    end: float


class EventJump:
    """How many decode steps can be made at once from a boundary, and when they end.

    The newest answer is kept until something changes: an input, somebody leaving, a step to be
    decided. Whoever changes something says so by `forget`.
    """

    __slots__ = ("_inbox", "_jump", "_scheduler")

    def __init__(self, scheduler: StepScheduler, inbox: Inbox) -> None:
        self._scheduler = scheduler
        self._inbox = inbox
        self._jump: Jump | None = None

    def forget(self) -> None:
        self._jump = None

    def plan(self, step: int, at: float) -> Jump | None:
        """From the boundary `step` at `at`: the last one, or that which ends the step under way.
        None if the next step has to be decided, or there is none."""
        jump = self._jump
        if jump is not None and jump.step == step and jump.at == at:
            return jump
        scheduler = self._scheduler
        if not scheduler.can_run() or scheduler.must_decide(step):
            return None
        batch = scheduler.batch
        steps = batch.steps_that_fit(step, batch.next_end() - step, scheduler.kv.free)
        if self._inbox.due < INFINITY:
            steps = min(steps, self._steps_to_input(step, at))
        seconds = scheduler.spec.cost.jump(steps, batch.count, batch.context(step))
        self._jump = jump = Jump(step, at, steps, at + seconds)
        return jump

    def _steps_to_input(self, step: int, at: float) -> int:
        """Steps up to the first boundary at or after the next input. The inverse of the formula
        is only a guess here: what is compared are the very sums that become the boundaries."""
        arrives, cost, batch = self._inbox.due, self._scheduler.spec.cost, self._scheduler.batch
        count, context = batch.count, batch.context(step)
        steps = max(1, cost.steps_within(arrives - at, count, context))
        while at + cost.jump(steps, count, context) < arrives:
            steps += 1
        while steps > 1 and at + cost.jump(steps - 1, count, context) >= arrives:
            steps -= 1
        return steps

    def steps_by(self, step: int, at: float, now: float) -> int:
        """Whole decode steps of the jump from this boundary that are over by now."""
        if now <= at:
            return 0
        jump = self.plan(step, at)
        if jump is None:
            return 0
        if now >= jump.end:
            return jump.steps
        batch = self._scheduler.batch
        return self._scheduler.spec.cost.steps_within(now - at, batch.count, batch.context(step))

    def end_of(self, wanted: int, step: int, at: float) -> float:
        """When the step `wanted` ends, if it is part of the jump from this boundary; else inf."""
        jump = self.plan(step, at)
        if jump is None or wanted - step > jump.steps:
            return INFINITY
        if wanted - step == jump.steps:
            return jump.end
        batch = self._scheduler.batch
        return at + self._scheduler.spec.cost.jump(wanted - step, batch.count, batch.context(step))
