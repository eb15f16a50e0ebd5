"""The scheduler: events in, actions out. The only place that decides.

`handle` checks one event, applies it, and then lets the roles decide, in an order that matters: a
delivery may end the round, the end of a round may let weights in, new weights may let groups start,
and groups that start are dispatched. There is no clock, no coroutine, no chance and no I/O in here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from rollout_sched.core import events as ev
from rollout_sched.core import invariants
from rollout_sched.core.actions import Action
from rollout_sched.core.attempts import AttemptLedger
from rollout_sched.core.backoff import Backoff
from rollout_sched.core.deliverer import Deliverer
from rollout_sched.core.dispatcher import Dispatcher
from rollout_sched.core.errors import CallerError
from rollout_sched.core.event_handlers import (
    AttemptEvents,
    ClientEvents,
    InstanceEvents,
    TrainerEvents,
)
from rollout_sched.core.finished_samples import FinishedSamples
from rollout_sched.core.fleet import Fleet
from rollout_sched.core.gathering import Gathering
from rollout_sched.core.group_outcomes import GroupOutcomes
from rollout_sched.core.groups import Groups
from rollout_sched.core.judgement import Judgement
from rollout_sched.core.launcher import Launcher
from rollout_sched.core.lender import Lender
from rollout_sched.core.length_history import LengthHistory
from rollout_sched.core.lifecycle import INTERRUPT, RUNNING, move
from rollout_sched.core.migrator import Migrator
from rollout_sched.core.outcomes import Outcomes
from rollout_sched.core.progress import RunProgress
from rollout_sched.core.requests import Requests
from rollout_sched.core.restorer import Restorer
from rollout_sched.core.roles import Roles
from rollout_sched.core.sample_buffer import SampleBuffer
from rollout_sched.core.selection_window import SelectionWindow
from rollout_sched.core.serials import Serials
from rollout_sched.core.sessions import Sessions
from rollout_sched.core.siblings import DirectSiblings
from rollout_sched.core.tuning import Tuning
from rollout_sched.core.updater import WeightUpdater
from rollout_sched.core.validation import CHECKS
from rollout_sched.core.verification import Verification
from rollout_sched.core.view import SchedulerView


class Scheduler:
    """Rollout scheduling for one trainer and one fleet.

    `prompts_per_step`: groups in a batch. `version`: the trainer's version at the start.
    `max_failures`: a request that failed so often in a row takes its group down with it.
    `backoff_s`: how long a request rests before it is tried once more, or an instance that is at
    fault before it gets more work; doubled for each time in a row up to 64 times.

    `anomalies` counts what the world said that cannot be true or came too late, by kind. What came
    too late changes nothing; token counts and versions that cannot be true are replaced by the
    nearest that can.
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
        self.anomalies: Counter[str] = Counter()
        self.serials = serials = Serials()
        self.prompt_lengths = LengthHistory() if roles.uses_history else None
        self.fleet = fleet = Fleet(
            roles.routing.load,
            roles.admission.admits,
            roles.sessions,
            counts_finished=roles.counts_finished,
        )
        self.groups = groups = Groups()
        self.sample_buffer = samples = SampleBuffer()
        self.progress = progress = RunProgress(
            prompts_per_step,
            version,
            fleet,
            groups,
            samples,
            keeps_recent=getattr(roles.batching, "uses_recent", False),
        )
        self.updater = updater = WeightUpdater(fleet, roles.weights, roles.interruption, version)
        self.sessions = Sessions()
        self.siblings = DirectSiblings()
        self.backoff = Backoff(backoff_s, out)
        ledger = AttemptLedger(fleet, samples, self.anomalies, out)
        self.requests = requests = Requests(roles, fleet, ledger, serials, out)
        self.verification = Verification(roles.verifies, fleet, samples, self.anomalies, out)
        self.finished = FinishedSamples(roles, progress, serials, out)
        self.group_outcomes = group_outcomes = GroupOutcomes(
            roles, groups, requests, samples, self.finished, self.verification, progress
        )
        self.outcomes = outcomes = Outcomes(
            group_outcomes, fleet, requests, self.siblings, self.finished, self.verification, out
        )
        self.migrator = Migrator(roles.migration, fleet, requests)
        self.gathering = Gathering(fleet, progress, out)
        self.lender = lender = Lender(roles.lending, fleet, updater, requests, progress, out)
        self.selection_window = window = SelectionWindow(roles.selection, groups, prompts_per_step)
        self.tuning = Tuning(roles, self.migrator, lender, window)
        self.launcher = launcher = Launcher(roles, groups, samples, window, progress, outcomes)
        self.deliverer = Deliverer(
            roles, samples, self.finished, progress, group_outcomes, launcher, lender, out
        )
        self.dispatcher = Dispatcher(
            roles,
            fleet,
            requests,
            self.migrator,
            self.verification,
            samples,
            self.sessions,
            out,
        )
        self.attempt_events = AttemptEvents(
            fleet,
            updater,
            lender,
            ledger,
            requests,
            outcomes,
            self.verification,
            progress,
            self.backoff,
            self.anomalies,
            out,
            max_failures,
        )
        self._apply = self._handlers(ledger, serials, out)
        self.view = SchedulerView(
            fleet,
            groups,
            requests,
            progress,
            self.sessions,
            self.anomalies,
            updater,
            self.finished,
            tuning=self.tuning,
            keeps_partial=roles.interruption.keeps_partial,
            leniency=roles.leniency,
            keeps_sessions=roles.keeps_sessions,
        )
        self._out = out

    def _handlers(
        self, ledger: AttemptLedger, serials: Serials, out: list[Action]
    ) -> dict[type[Any], Callable[[Any, float], None]]:
        """What applies each event. None of these knows the scheduler, so there is no cycle."""
        trainer = TrainerEvents(
            self.groups,
            self.sample_buffer,
            self.group_outcomes,
            self.progress,
            self.updater,
            self.lender,
            self.roles.freshness,
            serials,
            self.prompt_lengths,
        )
        client = ClientEvents(
            self.requests, self.siblings, self.outcomes, self.sessions, self.fleet, self.anomalies
        )
        instance = InstanceEvents(
            self.fleet,
            self.updater,
            self.lender,
            ledger,
            self.requests,
            self.outcomes,
            self.progress,
            self.backoff,
            self.anomalies,
            out,
        )
        judgement = Judgement(
            self.groups, self.sample_buffer, self.group_outcomes, self.progress, self.anomalies
        )
        return _table(
            trainer,
            client,
            instance,
            self.attempt_events,
            judgement,
            self._restorer(),
            self.tuning,
        )

    def _restorer(self) -> Restorer:
        return Restorer(
            self.fleet,
            self.groups,
            self.requests,
            self.outcomes,
            self.sample_buffer,
            self.finished,
            self.progress,
            self.updater,
            self.verification,
            self.selection_window,
            self.migrator,
            self.gathering,
            self.tuning,
            self.serials,
            self.prompt_lengths,
        )

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Apply `event`, which happened at `now` (seconds), and say what to do about it.

        Raises CallerError, with nothing changed, if the caller asked for the impossible.
        """
        kind = type(event)
        if kind in CHECKS:
            CHECKS[kind](self, event)
        self._apply[kind](event, now)
        self._decide(now)
        if now >= self.migrator.due_at and self.fleet.open and not self.requests.waiting.size:
            self.migrator.ask(now)
        out = self._out
        actions = out[:]
        out.clear()
        return actions

    def check_invariants(self) -> None:
        """Raise AssertionError, with the reason, if the books do not add up."""
        invariants.check(self)

    def _decide(self, now: float) -> None:
        """Asking the group-level roles for nothing would cost more than most events do."""
        progress, fleet, waiting = self.progress, self.fleet, self.requests.waiting
        changed = again = progress.dirty
        while again:
            progress.dirty = False
            if progress.trainer_waiting:
                self.deliverer.deliver()
            if self.updater.outdated:
                self._update_weights()
            self.launcher.launch()
            if progress.spent:
                self.launcher.renew_budgets()
            # A group that is launched may be whole: nothing of it has to be verified any more.
            again = progress.dirty and self.verification.on
        gathering = self.gathering
        if fleet.open and waiting.size and not (gathering.expected and gathering.holds(now)):
            self.dispatcher.dispatch()
        if self.lender.lends:
            self.lender.decide(changed)

    def _update_weights(self) -> None:
        for instance in self.updater.start(self.progress, self._out):
            for attempt in instance.attempts.values():
                if not attempt.abandoned and attempt.request.state is RUNNING:
                    move(attempt.request, INTERRUPT)


def _table(
    trainer: TrainerEvents,
    client: ClientEvents,
    instance: InstanceEvents,
    attempt: AttemptEvents,
    judgement: Judgement,
    restorer: Restorer,
    tuning: Tuning,
) -> dict[type[Any], Callable[[Any, float], None]]:
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
