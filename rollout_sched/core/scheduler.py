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
from rollout_sched.core.actions import Action, Deliver, Dispatch
from rollout_sched.core.attempts import AttemptLedger
from rollout_sched.core.backoff import Backoff
from rollout_sched.core.errors import CallerError, PolicyError
from rollout_sched.core.event_handlers import (
    AttemptEvents,
    ClientEvents,
    InstanceEvents,
    TrainerEvents,
)
from rollout_sched.core.finished_samples import FinishedSamples
from rollout_sched.core.fleet import Fleet
from rollout_sched.core.gathering import Gathering
from rollout_sched.core.groups import ACTIVE, COMPLETE, DEFERRED, JUDGING, SPENT, Groups
from rollout_sched.core.judgement import Judgement
from rollout_sched.core.lender import Lender
from rollout_sched.core.length_history import LengthHistory
from rollout_sched.core.lifecycle import DISPATCH, INTERRUPT, RUNNING, move
from rollout_sched.core.migrator import Migrator
from rollout_sched.core.model import Group, Instance, Request
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
        self.outcomes = outcomes = Outcomes(
            roles,
            fleet,
            groups,
            requests,
            self.siblings,
            samples,
            self.finished,
            self.verification,
            progress,
            out,
        )
        self.migrator = Migrator(roles.migration, fleet, requests)
        self.gathering = Gathering(fleet, progress, out)
        self.lender = lender = Lender(roles.lending, fleet, updater, requests, progress, out)
        self.selection_window = window = SelectionWindow(roles.selection, groups, prompts_per_step)
        self.tuning = Tuning(roles, self.migrator, lender, window)
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
        # A round that starts over what it leaves behind, or verifies it, has nothing that could
        # grow stale.
        keeps_old = roles.interruption.keeps_partial and not roles.verifies
        self._carries_over = keeps_old or not roles.batching.stops_at_delivery
        self._part_prompts = roles.batching.part_prompts
        self._asks_affinity = not roles.routing_keeps_sessions and roles.affinity.keeps_sessions
        self._out = out

    def _handlers(
        self, ledger: AttemptLedger, serials: Serials, out: list[Action]
    ) -> dict[type[Any], Callable[[Any, float], None]]:
        """What applies each event. None of these knows the scheduler, so there is no cycle."""
        trainer = TrainerEvents(
            self.groups,
            self.sample_buffer,
            self.outcomes,
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
            self.groups, self.sample_buffer, self.outcomes, self.progress, self.anomalies
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
                self._deliver()
            if self.updater.outdated:
                self._update_weights()
            self._launch()
            if progress.spent:
                self._renew_budgets()
            # A group that is launched may be whole: nothing of it has to be verified any more.
            again = progress.dirty and self.verification.on
        gathering = self.gathering
        if fleet.open and waiting.size and not (gathering.expected and gathering.holds(now)):
            self._dispatch()
        if self.lender.lends:
            self._lend(changed)

    # -- delivering ------------------------------------------------------------------------

    def _deliver(self) -> None:
        progress = self.progress
        missing = progress.missing
        if not missing:
            if progress.in_batch:
                self._hand_over([], last=True)  # what it lacked will never come
            return
        size = self.roles.batching.batch(progress)
        if not size:
            return
        groups = self.sample_buffer.oldest_first(size)
        if len(groups) < size or size > missing:
            raise PolicyError(
                f"batching asked for {size} of {len(groups)} complete groups, for a batch that "
                f"lacks {missing}"
            )
        if size < missing and not progress.takes_parts:
            return
        if self._carries_over and self._leaves_too_old(groups):
            if self._start_late_over():
                self._deliver()
                return
            self._recall_oldest()
            if not (self._part_prompts and progress.takes_parts):
                return
            groups = self._fewer(groups)
            if len(groups) < self._part_prompts:
                return
        self._hand_over(groups, last=len(groups) == missing)

    def _leaves_too_old(self, groups: list[Group]) -> bool:
        """Whether some that stay behind could no longer go in time if these went."""
        progress = self.progress
        remaining = self.sample_buffer.remaining(groups, progress.fleet_version)
        places = progress.missing - len(groups)
        return self.roles.freshness.must_wait(progress, remaining, places)

    def _start_late_over(self) -> bool:
        """Where a version took no batch, its places are lost, and more is open than can go in time,
        whatever waits: what is too much starts over, of the oldest the unfinished first, and of
        those the last to be launched. Returns whether there was any.

        Nobody starts over again and again while the trainer waits. What is open has a bound that
        versions and places alone say (`policies.freshness.Bounded`), and what is open changes no
        place: groups that have spent a budget are open, and the batch lacks as many whatever state
        the others are in. Once what was too much has gone, only a launch opens more, and that asks
        for room first; a batch, or a part of it, takes as many places as groups. So it is too much
        again only after a version that took no batch, or where an instance made older tokens than
        it was said to.

        And then the run comes to an end of every batch. As long as it lacks groups, some are under
        way: who has spent a budget goes on where nobody else can (`_renew_budgets`), and if the
        batch must wait, the oldest of those set back do (`_recall_oldest`), among which is who is
        due if nothing due is under way. Each that goes on makes a token or finishes, none is thrown
        away, and a response has a limit.
        """
        if not self._too_many_open():
            return False
        open_groups = self.sample_buffer.older_than(self.progress.version + 1)
        for group in sorted(open_groups, key=_most_dispensable_first):
            self.outcomes.start_over(group)
            if not self._too_many_open():
                break
        return True

    def _too_many_open(self) -> bool:
        """Those that were never dispatched may yet be of the newest version."""
        progress = self.progress
        remaining = self.sample_buffer.remaining([], progress.version)
        return self.roles.freshness.must_wait(progress, remaining, progress.lacking)

    def _fewer(self, groups: list[Group]) -> list[Group]:
        """As many of these, which may not all go, as may: each more takes the place of one that
        stays behind, so if so many may go, fewer may."""
        may, may_not = 0, len(groups)
        while may_not - may > 1:
            middle = (may + may_not) // 2
            if self._leaves_too_old(groups[:middle]):
                may_not = middle
            else:
                may = middle
        return groups[:may]

    def _hand_over(self, groups: list[Group], *, last: bool) -> None:
        """A batch, or the next part of it."""
        progress, sample = self.progress, self.finished.of
        samples = tuple(sample(request) for group in groups for request in group.finished)
        short = progress.lacking - len(groups) if last else 0
        self._out.append(
            Deliver(progress.batches, progress.version, samples, progress.parts, last, short)
        )
        for group in groups:
            self.outcomes.deliver(group)
        progress.part_delivered(len(groups))
        if last:
            self._end_round()

    def _end_round(self) -> None:
        progress = self.progress
        progress.batch_delivered()
        self.lender.call_off()
        if self.roles.batching.stops_at_delivery and progress.active + progress.spent:
            for group in self.sample_buffer.groups():
                if group.state is ACTIVE or group.state is SPENT:
                    self.outcomes.set_back(group)

    def _recall_oldest(self) -> None:
        """The batch may be waiting for groups that were set back: the oldest of them go on."""
        groups = self.groups.of(DEFERRED) + self.groups.of(SPENT)
        set_back = [group for group in groups if group in self.sample_buffer]
        newest = self.progress.fleet_version
        ages = [newest if g.oldest_version is None else g.oldest_version for g in set_back]
        for group, age in zip(set_back, ages, strict=True):
            if age == min(ages):
                self.outcomes.launch(group, 1.0)

    # -- weights ---------------------------------------------------------------------------

    def _update_weights(self) -> None:
        for instance in self.updater.start(self.progress, self._out):
            for attempt in instance.attempts.values():
                if not attempt.abandoned and attempt.request.state is RUNNING:
                    move(attempt.request, INTERRUPT)

    # -- launching -------------------------------------------------------------------------

    def _launch(self) -> None:
        progress, roles, groups = self.progress, self.roles, self.groups
        launch = roles.batching.launch(progress)
        if launch is None:
            return
        deferred, fresh = launch.deferred, launch.fresh
        if self._carries_over:
            allowed = roles.freshness.room(progress)
        elif progress.fleet_version >= roles.freshness.oldest_allowed(progress.version):
            allowed = deferred + fresh
        else:
            return  # instances that get their weights one after the other still make older tokens
        launched: list[Group] = []
        anew: list[Group] = []  # those that were set back and hold no tokens
        while deferred > 0 and progress.deferred:
            group = groups.first(DEFERRED)
            assert group is not None
            if group not in self.sample_buffer:
                if allowed <= 0:
                    break
                allowed -= 1
                anew.append(group)
            self.outcomes.launch(group, launch.oversample)
            launched.append(group)
            deferred -= 1
        fresh = min(fresh, allowed, progress.fresh)
        if fresh > 0:
            for group in self.selection_window.take(fresh, anew):
                self.outcomes.launch(group, launch.oversample)
                launched.append(group)
        progress.launched(launch, len(launched))
        for place, group in enumerate(launched):
            group.launch_place, group.launch_size = place, len(launched)

    def _renew_budgets(self) -> None:
        """Where nothing else can fill the batch, groups that have spent their budget go on."""
        progress = self.progress
        while progress.spent and progress.on_the_way < progress.prompts_per_step:
            group = self.groups.first(SPENT)
            assert group is not None
            self.outcomes.launch(group, 1.0)

    # -- lending ---------------------------------------------------------------------------

    def _lend(self, changed: bool) -> None:
        """Instances make way for the trainer, unless work or weights are on their way."""
        progress = self.progress
        if self.requests.waiting.size:
            if not self.fleet.attempts:
                self.lender.reclaim()
        elif changed and self._may_lend(progress):
            self.lender.ask()

    def _may_lend(self, progress: RunProgress) -> bool:
        wanted = progress.shares_gpus and progress.trainer_waiting
        return wanted and not progress.update_pending

    # -- dispatching -----------------------------------------------------------------------

    def _dispatch(self) -> None:
        waiting, fleet, routing = self.requests.waiting, self.fleet, self.roles.routing
        capped = fleet.sessions is not None
        waiting.recall()
        while fleet.open:
            request = waiting.first()
            if request is None:
                return
            if capped and not fleet.taking and request.home is None:
                return  # and whoever comes after it has no home either
            instance = self.migrator.meant_for(request) or routing.choose(request, fleet)
            if instance is None:
                return
            if instance.open_index < 0:
                raise PolicyError(f"routing chose {instance!r}, which is not open")
            if request.session and self._asks_affinity:
                instance = self._home_or(request, instance)
            choosy = request.failed_on or fleet.unlike or capped
            if choosy and not self._suits(request, instance):
                instance = self._elsewhere(request)
                if instance is None:
                    waiting.set_aside(request)
                    continue
            waiting.remove(request)
            self._send(request, instance)

    def _home_or(self, request: Request, elsewhere: Instance) -> Instance:
        """Where its session was last, if that is open and worth it."""
        if request.last_instance is None:
            return elsewhere
        home = self.fleet.open_instance(request.last_instance)
        if home is None or home is elsewhere:
            return elsewhere
        return home if self.roles.affinity.stays(request, home, elsewhere) else elsewhere

    def _suits(self, request: Request, instance: Instance) -> bool:
        if instance.id in request.failed_on:
            return False
        return self.fleet.fits(request, instance) and self.fleet.may_begin(request, instance)

    def _elsewhere(self, request: Request) -> Instance | None:
        """An open instance that it fits on, one where it has not failed if there is any."""
        load, fleet = self.roles.routing.load, self.fleet
        fitting = [i for i in fleet.open if fleet.fits(request, i) and fleet.may_begin(request, i)]
        return min(
            fitting, key=lambda i: (i.id in request.failed_on, load(i), i.serial), default=None
        )

    def _send(self, request: Request, instance: Instance) -> None:
        interruption = self.roles.interruption
        if self.verification.on:
            self.verification.trim(request, instance.version)
        limit = interruption.limit(request)
        max_new_tokens = self.requests.room_for(request) or 1
        if limit is not None and limit < max_new_tokens:
            max_new_tokens = limit
        move(request, DISPATCH)
        request.attempt = attempt = self.fleet.send(request, instance, max_new_tokens)
        request.last_attempt = attempt.id
        request.last_instance = instance.id
        if request.salt is None or not interruption.keeps_kv:
            request.salt = instance.version
        draft: ev.Spans = ()
        if self.verification.on:
            draft = self.verification.draft(request, instance.version)
            attempt.draft_tokens = sum([tokens for _, tokens in draft])
        group = request.group
        if group is not None:
            self.sample_buffer.note_version(group, instance.version)
        elif request.session:
            self.sessions.sent(request.session, instance.id)
        self._out.append(
            Dispatch(
                request.id,
                attempt.id,
                instance.id,
                request.context_tokens,
                max_new_tokens,
                request.salt,
                request.response_tokens,
                request.computed_tokens,
                request.turn,
                "" if group is None else group.id,
                0 if group is None else request.index,
                draft,
                request.ends,
            )
        )


def _most_dispensable_first(group: Group) -> tuple[int, bool, int]:
    whole = group.state is COMPLETE or group.state is JUDGING
    return (group.oldest_version or 0, whole, -group.serial)


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
