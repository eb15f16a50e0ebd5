"""The scheduler: events in, actions out. All decisions are made by it and the policies.

`handle` checks one event (`validation`), applies it (`handlers`), and then lets the roles decide
(`decide.order`). It uses no clock, no coroutine, no randomness and no I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_sched.core import invariants
from rollout_sched.core.decide.order import Decider
from rollout_sched.core.handlers import AttemptEvents, ClientEvents, InstanceEvents, TrainerEvents
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Action
from rollout_sched.core.model.errors import CallerError
from rollout_sched.core.model.roles import Roles
from rollout_sched.core.parts import Books, Work
from rollout_sched.core.restart.restore import Restorer
from rollout_sched.core.validation import CHECKS
from rollout_sched.core.view import SchedulerView
from rollout_sched.core.work.outcomes import Judgement

# ------------------------------------------------------------------------------------------
# The table of event handlers. No handler knows the scheduler, so there is no import cycle.

Handlers = dict[type[Any], Callable[[Any, float], None]]


def event_table(
    roles: Roles, books: Books, work: Work, decider: Decider, out: list[Action]
) -> Handlers:
    """Handlers by event type. They append actions to `out`."""
    trainer = TrainerEvents(roles, books, work, decider)
    client = ClientEvents(books, work)
    instance = InstanceEvents(books, work, decider, out)
    attempt = AttemptEvents(books, work, decider, out)
    judgement = Judgement(
        books.groups, books.sample_buffer, work.group_outcomes, books.progress, books.anomalies
    )
    restorer = Restorer(books, work, decider)
    return {
        ev.GroupSubmitted: trainer.group_submitted,
        ev.GroupJudged: judgement.judged,
        ev.SubmissionsClosed: trainer.submissions_closed,
        ev.BatchRequested: trainer.batch_requested,
        ev.WeightsPublished: trainer.weights_published,
        ev.RequestSubmitted: client.request_submitted,
        ev.RequestWithdrawn: client.request_withdrawn,
        ev.SessionEnded: client.session_ended,
        ev.InstanceJoined: instance.joined,
        ev.InstanceLost: instance.lost,
        ev.InstanceLeaving: instance.leaving,
        ev.InstanceReported: instance.reported,
        ev.InstancePaused: instance.paused,
        ev.InstanceReturned: instance.returned,
        ev.WeightsUpdated: instance.updated,
        ev.GateClosed: instance.gate_closed,
        ev.GateOpened: instance.gate_opened,
        ev.Woke: instance.woke,
        ev.TokensArrived: attempt.tokens_arrived,
        ev.RequestFinished: attempt.finished,
        ev.TurnFinished: attempt.turn_finished,
        ev.ToolReturned: attempt.tool_returned,
        ev.TrajectoryEnded: attempt.trajectory_ended,
        ev.RequestInterrupted: attempt.interrupted,
        ev.RequestFailed: attempt.failed,
        ev.Restored: restorer.restored,
    }


class Scheduler:
    """Rollout scheduling for one trainer and one fleet.

    `prompts_per_step`: groups in a batch. `version`: the trainer's version at the start.
    `max_failures`: if a request fails this often in a row, its group is lost. `backoff_s`: how long
    a request rests before it is tried again, or an instance that is at fault before it gets more
    work; doubled for each time in a row, up to 64 times.

    Events that come too late change nothing; impossible token counts and versions are replaced by
    the nearest possible ones. `view.anomalies` counts both, by kind.
    """

    def __init__(
        self,
        roles: Roles,
        prompts_per_step: int,
        *,
        version: int = 0,
        max_failures: int = 5,
        backoff_s: float = 1.0,
    ) -> None:
        if prompts_per_step < 1:
            raise CallerError(f"prompts_per_step must be at least 1, not {prompts_per_step}")
        out: list[Action] = []
        self.roles = roles
        self.books = books = Books(roles, prompts_per_step, version)
        self.work = work = Work(roles, books, max_failures, backoff_s, out)
        self.decider = decider = Decider(roles, books, work, out)
        self.view = SchedulerView(roles, books, work, decider.updater)
        self._apply = event_table(roles, books, work, decider, out)
        self._out = out

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Apply `event`, which happened at `now` (seconds), and return the resulting actions.

        Raises CallerError, with nothing changed, if the caller asked for the impossible.
        """
        kind = type(event)
        if kind in CHECKS:
            CHECKS[kind](self, event)
        self._apply[kind](event, now)
        self.decider.decide(now)
        out = self._out
        actions = out[:]
        out.clear()
        return actions

    def check_invariants(self) -> None:
        """Raise AssertionError, with the reason, if the books do not add up."""
        invariants.check(self)
