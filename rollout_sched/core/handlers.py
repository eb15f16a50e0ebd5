"""What each event changes, by sender. The scheduler decides on the consequences afterwards.

`validation.py` has already raised any CallerError: every event that gets this far is applied.
"""

from __future__ import annotations

from typing import Final

from rollout_sched.core.decide.order import Decider
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Release
from rollout_sched.core.model.model import (
    Attempt,
    Group,
    Instance,
    InstanceStatus,
    Request,
    Siblings,
)
from rollout_sched.core.state.lifecycle import ACT, ACTING, INTERRUPTING, PARKED, RUNNING, move
from rollout_sched.core.work import attempts as blame
from rollout_sched.core.work.parts import Parts

#: The scheduler gives up a request that others have stopped this often. A trainer that updates the
#: weights around us may stop a long request once in each of its steps.
MAX_EXTERNAL_ABORTS: Final = 60


class TrainerEvents:
    """Events from the trainer."""

    def __init__(self, parts: Parts, decider: Decider) -> None:
        self._state = parts.state
        self._outcomes = parts.group_outcomes
        self._updater = decider.updater
        self._lender = decider.lender

    def group_submitted(self, event: ev.GroupSubmitted, now: float) -> None:
        state, history = self._state, self._state.prompt_lengths
        siblings = Siblings(
            event.group,
            event.prompt_tokens,
            event.max_tokens,
            event.prompt,
            None if history is None else history.lengths_of(event.prompt, event.history),
            event.expected_tokens,
        )
        serial, samples = state.serials.next(), event.samples
        group = Group(
            event.group,
            serial,
            samples,
            siblings,
            judged=event.judged,
            resumable=event.resumable,
            min_samples=event.min_samples,
        )
        state.groups.add(group)
        state.progress.must_decide = True

    def submissions_closed(self, event: ev.SubmissionsClosed, now: float) -> None:
        progress = self._state.progress
        progress.closed = progress.must_decide = True

    def batch_requested(self, event: ev.BatchRequested, now: float) -> None:
        progress = self._state.progress
        progress.trainer_waiting = progress.must_decide = True
        progress.takes_parts = event.parts
        progress.shares_gpus = event.shares_gpus

    def weights_published(self, event: ev.WeightsPublished, now: float) -> None:
        """Groups that are too old start over. If an instance that was not told to update yet is too
        old itself, groups that could still be sent to it start over too.

        After that, no group is too old: nothing is launched before the fleet is young enough, and
        the fleet only gets younger. Paced groups never start over for this if every version has
        taken a batch. If old tokens are masked, groups stay.
        """
        progress, freshness = self._state.progress, self._state.roles.freshness
        progress.version, progress.loads = event.version, event.loads
        progress.must_decide = True
        self._lender.published()
        self._updater.published()
        if freshness.masks:
            return
        oldest = freshness.oldest_allowed(event.version)
        late = self._state.sample_buffer.older_than(oldest)
        if progress.fleet_version < oldest:
            late += self._state.sample_buffer.unfinished(oldest)
        for group in late:
            self._outcomes.start_over(group)


class ClientEvents:
    """Events from clients that wait for one response each."""

    def __init__(self, parts: Parts) -> None:
        self._state = parts.state
        self._requests = parts.requests
        self._outcomes = parts.outcomes

    def request_submitted(self, event: ev.RequestSubmitted, now: float) -> None:
        state = self._state
        siblings = state.siblings.join(event.group, event.prompt_tokens, event.max_tokens)
        request = self._requests.create(siblings, None, siblings.joined - 1, event.request)
        request.client = state.shares.admit(event.client, now)
        state.progress.must_decide |= state.shares.crowded
        request.session = event.session
        request.priority = event.priority
        request.resumable = event.resumable
        request.last_instance = state.sessions.last_instance(event.session)
        kv_instance = state.fleet.instances.get(request.last_instance or "")
        if kv_instance is not None:
            state.fleet.retain_kv(request, kv_instance)
        if not (event.prior_segments or event.ends):
            self._requests.wait(request)
            return
        request.segments = event.prior_segments
        request.response_tokens = sum([segment.tokens for segment in event.prior_segments])
        request.context_tokens += request.response_tokens
        if event.ends:
            self._outcomes.finish(request, "stop")
        else:
            self._outcomes.requeue(request)

    def request_withdrawn(self, event: ev.RequestWithdrawn, now: float) -> None:
        request = self._requests.get(event.request)
        if request is None or request.group is not None:
            self._state.anomalies["unknown_request"] += 1
        else:
            self._outcomes.end_direct(request, "withdrawn")

    def request_aborted(self, event: ev.RequestAborted, now: float) -> None:
        request = self._requests.get(event.request)
        if request is None or request.group is not None:
            self._state.anomalies["unknown_request"] += 1
        else:
            self._outcomes.cut_short(request)

    def session_ended(self, event: ev.SessionEnded, now: float) -> None:
        if not self._state.sessions.end(event.session):
            self._state.anomalies["unknown_session"] += 1


class InstanceEvents:
    """Events from instances, and observations of them."""

    def __init__(self, parts: Parts, decider: Decider) -> None:
        self._parts = parts
        self._state = parts.state
        self._updater = decider.updater
        self._lender = decider.lender

    def joined(self, event: ev.InstanceJoined, now: float) -> None:
        fleet = self._state.fleet
        before = fleet.instances.get(event.instance)
        if before is not None:
            # It restarted before the loss was noticed: its attempts are gone.
            self._lose(before)
        instance = fleet.join(
            event.instance, event.slots, event.kv_tokens, event.version, event.max_model_len
        )
        self._updater.joined(instance)
        self._state.progress.must_decide = True
        self._refuse_oversized()

    def lost(self, event: ev.InstanceLost, now: float) -> None:
        instance = self._find(event.instance)
        self._state.progress.must_decide = True
        if instance is not None:
            self._lose(instance, removed=event.requested)
            if event.requested:
                self._refuse_oversized()

    def leaving(self, event: ev.InstanceLeaving, now: float) -> None:
        instance = self._find(event.instance)
        if instance is not None and not instance.leaving:
            instance.leaving = True
            self._state.fleet.touch(instance)
            if not instance.attempts:
                self._state.orders.append(Release(instance.id))

    def reported(self, event: ev.InstanceReported, now: float) -> None:
        instance = self._find(event.instance)
        if instance is not None:
            self._state.fleet.report(instance, event)
            if (event.waiting or event.kv_usage > 0.5) and self._state.shares.in_flight:
                self._state.progress.must_decide = True

    def paused(self, event: ev.InstancePaused, now: float) -> None:
        instance = self._find(event.instance)
        self._state.progress.must_decide = True
        if instance is not None and not self._updater.paused(instance):
            self._state.anomalies["pause_not_asked_for"] += 1

    def updated(self, event: ev.WeightsUpdated, now: float) -> None:
        instance = self._find(event.instance)
        self._state.progress.must_decide = True
        if instance is None:
            return
        if event.version > self._state.progress.version:
            self._state.anomalies["version_never_published"] += 1
        elif self._updater.updated(instance, event.version):
            pass
        elif self._updater.found(instance, event.version):
            self._lender.found(instance)
        else:
            self._state.anomalies["update_not_asked_for"] += 1

    def gate_closed(self, event: ev.GateClosed, now: float) -> None:
        self._set_gate(event.instance, closed=True)

    def gate_opened(self, event: ev.GateOpened, now: float) -> None:
        self._set_gate(event.instance, closed=False)

    def _set_gate(self, name: str, *, closed: bool) -> None:
        instance = self._find(name)
        if instance is not None:
            instance.gate_closed = closed
            self._state.fleet.touch(instance)

    def returned(self, event: ev.InstanceReturned, now: float) -> None:
        instance = self._find(event.instance)
        self._state.progress.must_decide = True
        if instance is not None and not self._lender.returned(instance):
            self._state.anomalies["instance_not_lent"] += 1

    def woke(self, event: ev.Woke, now: float) -> None:
        for who in self._parts.backoff.wake(now):
            if isinstance(who, Instance):
                if who.status is not InstanceStatus.LOST:
                    self._state.fleet.touch(who)
            elif who.state is PARKED and who.active:
                self._parts.requests.rested(who)

    def _find(self, name: str) -> Instance | None:
        instance = self._state.fleet.instances.get(name)
        if instance is None:
            self._state.anomalies["unknown_instance"] += 1
        return instance

    def _lose(self, instance: Instance, *, removed: bool = False) -> None:
        self._lender.lost(instance)
        self._updater.lost(instance)
        for request in list(instance.resident.values()):
            self._parts.requests.leave_home(request)
        lost = self._state.fleet.lose(instance, removed=removed)
        wanted = [attempt for attempt in lost if not attempt.abandoned]
        for attempt in lost:
            if attempt.abandoned:
                self._parts.ledger.waste(attempt, attempt.abandoned)
            else:
                self._parts.ledger.record_cut(attempt, ())
        for attempt in wanted:
            # The first request that continues may complete its group and end a sibling here.
            if attempt.request.state in (RUNNING, INTERRUPTING):
                self._try_again(attempt, removed=removed)

    def _try_again(self, attempt: Attempt, *, removed: bool) -> None:
        """A request may be what its instances die of. No instance is at fault: it is gone."""
        request = attempt.request
        request.failures += not (removed or attempt.tokens)
        if request.failures >= self._parts.outcomes.max_failures:
            self._parts.outcomes.give_up(request)
        else:
            self._parts.outcomes.requeue(request)

    def _refuse_oversized(self) -> None:
        """End requests that fit on no instance: they came before any was known, or the one that
        they fitted on was removed."""
        most = self._state.fleet.contexts.most
        if not most:
            return
        for request in list(self._parts.requests.waiting):
            if request.group is None and request.context_tokens + request.remaining_tokens > most:
                self._parts.outcomes.end_direct(request, "oversized")


class AttemptEvents:
    """Events about attempts."""

    def __init__(self, parts: Parts, decider: Decider) -> None:
        self._parts = parts
        self._state = parts.state
        self._ledger = parts.ledger
        self._requests = parts.requests
        self._outcomes = parts.outcomes
        self._updater = decider.updater
        self._lender = decider.lender

    def tokens_arrived(self, event: ev.TokensArrived, now: float) -> None:
        attempt = self._ledger.find(event)
        if attempt is None:
            return
        if not attempt.tokens <= event.tokens <= attempt.max_new_tokens:
            self._state.anomalies["tokens_out_of_range"] += 1
            return
        attempt.tokens = event.tokens
        if attempt.abandoned:  # the tokens are thrown away when the attempt ends
            return
        self._requests.expectations.learn(attempt.request.siblings)
        self._requests.expectations.expect_running(attempt.request)

    def finished(self, event: ev.RequestFinished, now: float) -> None:
        attempt = self._close(event, now)
        if attempt is None:
            return
        request = attempt.request
        full = event.reason == "length" and (
            attempt.tokens >= attempt.max_new_tokens
            or (request.resumable and self._fits_elsewhere(attempt))
        )
        if (full or event.reason == "segment") and request.remaining_tokens > 0:
            self._outcomes.end_segment(request)
        else:
            self._outcomes.finish(request, event.reason)
        self._check_age(attempt, event.spans)

    def turn_finished(self, event: ev.TurnFinished, now: float) -> None:
        attempt = self._close(event, now)
        if attempt is None:
            return
        request = attempt.request
        if self._requests.room_for(request):
            move(request, ACT)
            request.turn += 1
            self._state.fleet.retain_kv(request, attempt.instance)
        else:
            self._outcomes.finish(request, "length")
        self._check_age(attempt, event.spans)

    def tool_returned(self, event: ev.ToolReturned, now: float) -> None:
        request = self._acting(event)
        if request is None:
            return
        if event.observation_tokens < 0:
            self._state.anomalies["tokens_out_of_range"] += 1
        request.context_tokens += max(0, event.observation_tokens)
        self._outcomes.requeue(request)

    def trajectory_ended(self, event: ev.TrajectoryEnded, now: float) -> None:
        request = self._acting(event)
        if request is None:
            return
        if event.reason == "failed":
            self._outcomes.give_up(request)
        else:
            request.turn -= 1  # a turn that no tool has answered may have to be made again
            self._outcomes.finish(request, event.reason)

    def _acting(self, event: ev.ToolReturned | ev.TrajectoryEnded) -> Request | None:
        """The request whose turn this attempt made; None if it does not wait for a tool."""
        request = self._requests.get(event.request)
        if request is None or request.state is not ACTING or request.last_attempt != event.attempt:
            self._state.anomalies["unknown_turn"] += 1
            return None
        return request

    def interrupted(self, event: ev.RequestInterrupted, now: float) -> None:
        attempt = self._close(event, now, cut=True)
        if attempt is None:
            return
        request, starts_over = attempt.request, event.resumable is False
        if not request.aborted:
            if request.state is RUNNING and (starts_over or self._requests.room_for(request)):
                # Another party pauses that instance, perhaps for a while.
                request.external_aborts += 1
                if request.external_aborts > MAX_EXTERNAL_ABORTS:
                    self._outcomes.give_up(request)
                    return
                self._parts.backoff.rest(request, 0, now)
            if starts_over:
                request.resumable = False
                self._requests.start_over(request, "not_resumable")
        self._outcomes.requeue(request)
        self._check_age(attempt, event.spans)

    def _check_age(self, attempt: Attempt, spans: ev.Spans) -> None:
        """Check the age of the group if its instance had older weights than we knew."""
        group = attempt.request.group
        if spans and spans[0][0] < attempt.version and group is not None:
            self._outcomes.groups.check_age(group)

    def failed(self, event: ev.RequestFailed, now: float) -> None:
        attempt = self._ledger.find(event)
        if attempt is None:
            return
        if event.blame == "instance" and not attempt.instance.rests_until:
            # Attempts that fail while it rests were sent before: they are the same incident.
            self._rest(attempt.instance, now)
        self._free(attempt)
        if attempt.abandoned:
            self._ledger.waste(attempt, attempt.abandoned)
            return
        if not event.usable:
            self._ledger.waste(attempt, "untrue")
            attempt.tokens = 0
        self._ledger.record_cut(attempt, ())
        self._try_again(attempt, event, now)

    def _try_again(self, attempt: Attempt, event: ev.RequestFailed, now: float) -> None:
        request = attempt.request
        if request.aborted:
            self._outcomes.requeue(request)
            return
        if event.blame == "unclear":
            blame.record_unclear(request, attempt.instance)
        at_fault = event.blame == "request"
        at_fault |= event.blame == "length" and not self._fits_elsewhere(attempt)
        if at_fault or request.failures >= self._outcomes.max_failures:
            self._outcomes.give_up(request)
            return
        if event.blame == "unclear" and not self._may_try_elsewhere(request):
            self._parts.backoff.rest(request, request.failures - 1, now)
        elif event.blame == "nobody":  # the pause may last
            self._parts.backoff.rest(request, 0, now)
        self._outcomes.requeue(request)

    def _fits_elsewhere(self, attempt: Attempt) -> bool:
        """The request is longer than its attempt's instance takes: whether another takes more, on
        which it goes on."""
        limit = attempt.instance.max_context
        if limit >= (self._state.fleet.contexts.largest or 0):
            return False
        attempt.request.least_context = limit + 1
        return True

    def _may_try_elsewhere(self, request: Request) -> bool:
        """Once, and only on an instance where it has not failed; after more failures it waits."""
        return request.failures == 1 and len(self._state.fleet.instances) > len(request.failed_on)

    def _close(self, event: ev.Answered, now: float, *, cut: bool = False) -> Attempt | None:
        """Free the slot and keep the tokens; None if the answer is no longer wanted."""
        attempt = self._ledger.find(event)
        if attempt is None:
            return None
        instance = attempt.instance
        if instance.suspects or instance.faults or instance.rests:
            blame.clear(instance)
        tokens = event.tokens
        if not 0 <= tokens <= attempt.max_new_tokens:
            tokens = self._ledger.possible(attempt, tokens)
        attempt.tokens = tokens
        self._free(attempt)
        if attempt.abandoned:
            self._ledger.waste(attempt, attempt.abandoned)
            return None
        if attempt.request.failures:
            for at_fault in blame.blame_failed_instances(
                attempt.request, self._state.fleet.instances
            ):
                self._rest(at_fault, now)
        if cut:
            self._ledger.record_cut(attempt, event.spans)
        else:
            self._ledger.record(attempt, event.spans)
        return attempt

    def _free(self, attempt: Attempt) -> None:
        """The instance no longer holds the attempt."""
        instance = attempt.instance
        self._state.fleet.close(attempt)
        if not instance.attempts:
            self._state.progress.must_decide |= self._updater.emptied(instance)
            self._lender.emptied(instance)
            if instance.leaving:
                self._state.orders.append(Release(instance.id))

    def _rest(self, instance: Instance, now: float) -> None:
        """Let an instance that is at fault rest before it gets more work."""
        self._parts.backoff.rest(instance, instance.rests, now)
        instance.rests += 1
        instance.faults = 0
        self._state.fleet.touch(instance)
