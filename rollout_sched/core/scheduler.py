"""The scheduler: events in, actions out. All decisions are made by it and the policies.

`handle` checks one event (`validation`), applies it (`handlers`), and then lets the roles decide
(`decide.order`). It uses no clock, no coroutine, no randomness and no I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_sched.core import invariants
from rollout_sched.core.decide.order import Decider
from rollout_sched.core.errors import CallerError
from rollout_sched.core.handlers import AttemptEvents, ClientEvents, InstanceEvents, TrainerEvents
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Action
from rollout_sched.core.model.roles import Roles
from rollout_sched.core.restart.restore import Restorer
from rollout_sched.core.state.state import State
from rollout_sched.core.validation import CHECKS
from rollout_sched.core.view import SchedulerView
from rollout_sched.core.work.outcomes import Judgement
from rollout_sched.core.work.parts import Parts

# ------------------------------------------------------------------------------------------
# The table of event handlers. No handler knows the scheduler, so there is no import cycle.

Handlers = dict[type[Any], Callable[[Any, float], None]]


def event_table(parts: Parts, decider: Decider) -> Handlers:
    """Handlers by event type. They append actions to `State.orders`."""
    trainer = TrainerEvents(parts, decider)
    client = ClientEvents(parts)
    instance = InstanceEvents(parts, decider)
    attempt = AttemptEvents(parts, decider)
    judgement = Judgement(parts.state, parts.group_outcomes)
    restorer = Restorer(parts, decider)
    return {
        ev.GroupSubmitted: trainer.group_submitted,
        ev.GroupJudged: judgement.judged,
        ev.SubmissionsClosed: trainer.submissions_closed,
        ev.BatchRequested: trainer.batch_requested,
        ev.WeightsPublished: trainer.weights_published,
        ev.RequestSubmitted: client.request_submitted,
        ev.RequestWithdrawn: client.request_withdrawn,
        ev.RequestAborted: client.request_aborted,
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
    `max_failures`: if a request fails, or its instance is lost, this often in a row, its group is
    lost. `backoff_s`: how long a request rests before it is tried again, or an instance that is at
    fault before it gets more work; doubled for each time in a row, up to 64 times.

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
        self.roles = roles
        self.state = State(roles, prompts_per_step, version)
        self.parts = Parts(self.state, max_failures, backoff_s)
        self.decider = Decider(self.parts)
        self.view = SchedulerView(self.parts)
        self._apply = event_table(self.parts, self.decider)

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Apply `event`, which happened at `now` (seconds), and return the resulting actions.

        Raises CallerError, with nothing changed, if the caller asked for the impossible.
        """
        kind = type(event)
        if kind in CHECKS:
            CHECKS[kind](self.parts, event)
        self._apply[kind](event, now)
        self.decider.decide(now)
        orders = self.state.orders
        actions = orders[:]
        orders.clear()
        return actions

    def check_invariants(self) -> None:
        """Raise AssertionError, with the reason, if the state does not add up."""
        invariants.check(self.parts, self.decider)
