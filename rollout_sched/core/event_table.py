"""The table of event handlers. No handler knows the scheduler, so there is no import cycle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_sched.core import events as ev
from rollout_sched.core.actions import Action
from rollout_sched.core.books import Books
from rollout_sched.core.decider import Decider
from rollout_sched.core.event_handlers import (
    AttemptEvents,
    ClientEvents,
    InstanceEvents,
    TrainerEvents,
)
from rollout_sched.core.judgement import Judgement
from rollout_sched.core.restorer import Restorer
from rollout_sched.core.roles import Roles
from rollout_sched.core.tuning import Tuning
from rollout_sched.core.work import Work

Handlers = dict[type[Any], Callable[[Any, float], None]]


def event_table(
    roles: Roles, books: Books, work: Work, decider: Decider, tuning: Tuning, out: list[Action]
) -> Handlers:
    """Handlers by event type. They append actions to `out`."""
    trainer = TrainerEvents(roles, books, work, decider)
    client = ClientEvents(books, work)
    instance = InstanceEvents(books, work, decider, out)
    attempt = AttemptEvents(books, work, decider, out)
    judgement = Judgement(
        books.groups, books.sample_buffer, work.group_outcomes, books.progress, books.anomalies
    )
    restorer = Restorer(books, work, decider, tuning)
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
        ev.PrefixVerified: attempt.verified,
        ev.RequestFinished: attempt.finished,
        ev.TurnFinished: attempt.turn_finished,
        ev.ToolReturned: attempt.tool_returned,
        ev.TrajectoryEnded: attempt.trajectory_ended,
        ev.RequestInterrupted: attempt.interrupted,
        ev.RequestFailed: attempt.failed,
        ev.Restored: restorer.restored,
        ev.Retuned: tuning.retuned,
    }
