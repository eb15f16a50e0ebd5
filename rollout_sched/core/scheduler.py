"""The scheduler: events in, actions out. The only place that changes state.

`handle` applies one event and then lets the roles decide, in an order that matters: a delivery may
end the round, the end of a round may let weights in, new weights may let groups start, and groups
that start are dispatched. There is no clock, no coroutine, no chance and no I/O in here.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable
from math import ceil
from typing import Any

from rollout_sched.core import blame, invariants
from rollout_sched.core.actions import (
    Action,
    Answer,
    Deliver,
    Discard,
    Dispatch,
    Interrupt,
    Release,
    Wake,
)
from rollout_sched.core.backoff import Backoff
from rollout_sched.core.errors import CallerError, PolicyError
from rollout_sched.core.events import (
    BatchRequested,
    Event,
    GroupSubmitted,
    InstanceJoined,
    InstanceLeaving,
    InstanceLost,
    InstancePaused,
    InstanceReported,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    RequestWithdrawn,
    SessionEnded,
    Spans,
    SubmissionsClosed,
    TokensArrived,
    ToolReturned,
    TurnFinished,
    WeightsPublished,
    WeightsUpdated,
    Woke,
)
from rollout_sched.core.fleet import Fleet
from rollout_sched.core.lifecycle import (
    ACT,
    ACTING,
    DISPATCH,
    END,
    FINISH,
    FINISHED,
    INTERRUPT,
    INTERRUPTING,
    PARK,
    PARKED,
    RETURN,
    RUNNING,
    WAITING,
    move,
)
from rollout_sched.core.model import (
    Attempt,
    Group,
    Instance,
    InstanceStatus,
    Request,
    Sample,
    Segment,
)
from rollout_sched.core.progress import RunProgress
from rollout_sched.core.replay_buffer import ReplayBuffer
from rollout_sched.core.roles import Roles
from rollout_sched.core.sample_buffer import SampleBuffer
from rollout_sched.core.sessions import Sessions
from rollout_sched.core.updater import WeightUpdater
from rollout_sched.core.waiting import WaitingQueue

#: Events after which batching, freshness or weights may answer differently. Groups that complete,
#: fail or start over are the other cause.
STIRRING = frozenset(
    (
        InstanceJoined,
        InstanceLost,
        GroupSubmitted,
        SubmissionsClosed,
        WeightsPublished,
        InstancePaused,
        WeightsUpdated,
        BatchRequested,
    )
)

#: Siblings that are remembered together. Each answer teaches all of them, so a client that never
#: changes its group would make every request dearer than the one before.
MOST_SIBLINGS = 64

Answered = RequestFinished | TurnFinished | RequestInterrupted | RequestFailed


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
        self.roles = roles
        self.max_failures = max_failures
        self.backoff = Backoff(backoff_s)
        self._weigh_tokens = roles.weigh_tokens
        self.fleet = Fleet(roles.routing.load, roles.admission.admits)
        self.waiting = WaitingQueue()
        self.replay_buffer = ReplayBuffer()
        self.sample_buffer = SampleBuffer()
        self.progress = RunProgress(prompts_per_step, version, self.fleet, self.sample_buffer)
        self.updater = WeightUpdater(self.fleet, roles.weights, roles.interruption, version)
        self.groups: dict[str, Group] = {}
        self.direct_groups: dict[tuple[str, int, int], Group] = {}
        self.requests: dict[str, Request] = {}
        self.sessions = Sessions()
        self.anomalies: Counter[str] = Counter()
        # A round that starts over what it leaves behind has nothing that could grow stale.
        self._carries_over = (
            roles.interruption.keeps_partial or not roles.batching.stops_at_delivery
        )
        self._serial = 0
        # Asking the group-level roles for nothing would cost more than most events do.
        self._stirred = False
        self._out: list[Action] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply `event`, which happened at `now` (seconds), and say what to do about it.

        Raises CallerError, with nothing changed, if the caller asked for the impossible.
        """
        out: list[Action] = []
        self._out = out
        kind = type(event)
        _APPLY[kind](self, event, now)
        if kind in STIRRING:
            self._stirred = True
        self._decide()
        return out

    def check_invariants(self) -> None:
        """Raise AssertionError, with the reason, if the books do not add up."""
        invariants.check(self)

    # -- deciding --------------------------------------------------------------------------

    def _decide(self) -> None:
        if self._stirred:
            self._stirred = False
            if self.progress.trainer_waiting:
                self._deliver()
            if self.updater.outdated:
                self._update_weights()
            self._launch()
        if not self.fleet.attempts and self.replay_buffer and not self.waiting:
            self._renew_budgets()
        if self.waiting and self.fleet.open:
            self._dispatch()

    def _deliver(self) -> None:
        progress = self.progress
        size = self.roles.batching.batch(progress)
        if not size:
            return
        groups = self.sample_buffer.oldest_first(size)
        if len(groups) < size:
            raise PolicyError(f"batching asked for {size} of {len(groups)} complete groups")
        if self._carries_over:
            remaining = self.sample_buffer.remaining(groups, progress.fleet_version)
            if self.roles.freshness.must_wait(progress, remaining):
                self._recall_oldest()
                return
        samples = tuple(self._sample(request) for group in groups for request in group.finished)
        self._out.append(Deliver(progress.batches, progress.version, samples))
        for group in groups:
            self._forget(group)
        progress.batches += 1
        progress.delivered += len(groups)
        progress.trainer_waiting = False
        progress.round = None
        if self.roles.batching.stops_at_delivery and progress.active:
            for group in self.sample_buffer.groups():
                if group.active:
                    self._set_back(group)

    def _recall_oldest(self) -> None:
        """The batch may be waiting for groups that were set back: the oldest of them go on."""
        deferred = self.progress.deferred_groups
        held = [group for group in deferred.values() if group in self.sample_buffer]
        newest = self.progress.fleet_version
        ages = [newest if g.oldest_version is None else g.oldest_version for g in held]
        for group, age in zip(held, ages, strict=True):
            if age == min(ages):
                del deferred[group.id]
                self._activate(group, 1.0)

    def _update_weights(self) -> None:
        for instance in self.updater.start(self.progress, self._out):
            for attempt in instance.attempts.values():
                if not attempt.disowned and attempt.request.state is RUNNING:
                    move(attempt.request, INTERRUPT)

    def _launch(self) -> None:
        progress, roles = self.progress, self.roles
        launch = roles.batching.launch(progress)
        if launch is None:
            return
        if progress.round is None:
            progress.round = launch
        deferred, fresh = launch.deferred, launch.fresh
        room = roles.freshness.room(progress) if self._carries_over else deferred + fresh
        while deferred > 0 and progress.deferred_groups:
            group = next(iter(progress.deferred_groups.values()))
            if group not in self.sample_buffer:
                if room <= 0:
                    break
                room -= 1
            del progress.deferred_groups[group.id]
            self._activate(group, launch.oversample)
            deferred -= 1
        for _ in range(min(fresh, room, progress.fresh)):
            self._activate(progress.fresh_groups.popleft(), launch.oversample)

    def _renew_budgets(self) -> None:
        """Nothing runs and nothing waits: let those that used up their segment go on."""
        for request in list(self.replay_buffer):
            if request.group.active and not request.rests_until:
                self._return(request)

    def _dispatch(self) -> None:
        waiting, fleet, routing = self.waiting, self.fleet, self.roles.routing
        while fleet.open:
            request = waiting.first()
            if request is None:
                return
            instance = routing.choose(request, fleet)
            if instance is None:
                return
            if instance.place < 0:
                raise PolicyError(f"routing chose {instance!r}, which is not open")
            waiting.pop_first()
            if instance.id in request.failed_on:
                instance = self._elsewhere(request, instance)
            self._send(request, instance)

    def _elsewhere(self, request: Request, chosen: Instance) -> Instance:
        """Where it has not failed yet, if such an instance is open."""
        load = self.roles.routing.load
        others = [i for i in self.fleet.open if i.id not in request.failed_on]
        return min(others, key=lambda i: (load(i), i.serial), default=chosen)

    def _send(self, request: Request, instance: Instance) -> None:
        interruption = self.roles.interruption
        limit = interruption.limit(request)
        left = request.group.max_tokens - request.response_tokens
        max_new_tokens = max(1, min(left, self._room_for(request)))
        if limit is not None and limit < max_new_tokens:
            max_new_tokens = limit
        move(request, DISPATCH)
        request.attempt = attempt = self.fleet.send(request, instance, max_new_tokens)
        request.last_attempt = attempt.id
        request.home = instance.id
        if request.salt is None or not interruption.keeps_kv:
            request.salt = instance.version
        if not request.group.direct:
            self.sample_buffer.stamp(request.group, instance.version)
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
            )
        )

    # -- what the trainer says -------------------------------------------------------------

    def _group_submitted(self, event: GroupSubmitted, now: float) -> None:
        if event.group in self.groups:
            raise CallerError(f"group {event.group!r} is already here; give each group its own id")
        if event.samples < 1 or event.max_tokens < 1 or event.prompt_tokens < 1:
            raise CallerError(
                f"group {event.group!r}: samples, prompt_tokens and max_tokens must be at least 1, "
                f"not {event.samples}, {event.prompt_tokens} and {event.max_tokens}"
            )
        if self.progress.closed:
            raise CallerError(f"group {event.group!r} came after submissions were closed")
        needed = event.prompt_tokens + event.max_tokens
        self._check_fits("group", event.group, needed, self.fleet.kv_tokens)
        group = Group(
            event.group, self._next_serial(), event.samples, event.prompt_tokens, event.max_tokens
        )
        self.groups[group.id] = group
        self.progress.fresh_groups.append(group)

    def _request_submitted(self, event: RequestSubmitted, now: float) -> None:
        if event.request in self.requests:
            raise CallerError(f"request {event.request!r} is already here; ids are used once")
        if event.prompt_tokens < 1 or event.max_tokens < 1:
            raise CallerError(
                f"request {event.request!r}: prompt_tokens and max_tokens must be at least 1, "
                f"not {event.prompt_tokens} and {event.max_tokens}"
            )
        needed = event.prompt_tokens + event.max_tokens
        self._check_fits("request", event.request, needed, self.fleet.kv_tokens)
        # Siblings have the same prompt and limit; who differs is no help for prediction.
        key = (event.group, event.prompt_tokens, event.max_tokens)
        group = self.direct_groups.get(key)
        if group is None or group.samples >= MOST_SIBLINGS:
            group = Group(event.group, self._next_serial(), 0, *key[1:], direct=True, active=True)
            self.direct_groups[key] = group
        request = self._create(group, group.samples, event.request)
        group.samples += 1
        request.session = event.session
        request.home = self.sessions.home(event.session)
        self._return(request)

    def _request_withdrawn(self, event: RequestWithdrawn, now: float) -> None:
        request = self.requests.get(event.request)
        if request is None or not request.group.direct:
            self.anomalies["unknown_request"] += 1
            return
        self._end(request, "withdrawn")
        self._leave(request)

    def _session_ended(self, event: SessionEnded, now: float) -> None:
        if not self.sessions.end(event.session):
            self.anomalies["unknown_session"] += 1

    def _submissions_closed(self, event: SubmissionsClosed, now: float) -> None:
        self.progress.closed = True

    def _batch_requested(self, event: BatchRequested, now: float) -> None:
        self.progress.trainer_waiting = True

    def _weights_published(self, event: WeightsPublished, now: float) -> None:
        progress = self.progress
        if event.version <= progress.version:
            raise CallerError(
                f"version {event.version} was published after {progress.version}; versions grow"
            )
        progress.version = event.version
        self.updater.publish(event.version)
        oldest = self.roles.freshness.oldest_allowed(event.version)
        for group in self.sample_buffer.older_than(oldest):
            self._start_over(group)

    # -- what an instance says -------------------------------------------------------------

    def _instance_joined(self, event: InstanceJoined, now: float) -> None:
        name, newest = event.instance, self.progress.version
        if event.slots < 1 or event.kv_tokens < 1:
            raise CallerError(
                f"instance {name!r}: slots and kv_tokens must be at least 1, "
                f"not {event.slots} and {event.kv_tokens}"
            )
        if event.version > newest:
            raise CallerError(
                f"instance {name!r} joined with version {event.version}, but the trainer is at "
                f"{newest}; start the scheduler with version={event.version}, or reload it"
            )
        largest = max(
            self.groups.values(), key=lambda g: g.prompt_tokens + g.max_tokens, default=None
        )
        if largest is not None:
            needed = largest.prompt_tokens + largest.max_tokens
            self._check_fits("group", largest.id, needed, event.kv_tokens)
        before = self.fleet.instances.get(event.instance)
        if before is not None:
            # It restarted before anybody noticed: what it held is gone.
            self._lose(before)
        instance = self.fleet.join(event.instance, event.slots, event.kv_tokens, event.version)
        self.updater.joined(instance, self._out)

    def _instance_lost(self, event: InstanceLost, now: float) -> None:
        instance = self._instance(event.instance)
        if instance is not None:
            self._lose(instance)

    def _instance_leaving(self, event: InstanceLeaving, now: float) -> None:
        instance = self._instance(event.instance)
        if instance is not None and not instance.leaving:
            instance.leaving = True
            self.fleet.touch(instance)
            if not instance.attempts:
                self._out.append(Release(instance.id))

    def _instance_reported(self, event: InstanceReported, now: float) -> None:
        self._instance(event.instance)

    def _instance_paused(self, event: InstancePaused, now: float) -> None:
        instance = self._instance(event.instance)
        if instance is not None and not self.updater.paused(instance, self._out):
            self.anomalies["pause_not_asked_for"] += 1

    def _weights_updated(self, event: WeightsUpdated, now: float) -> None:
        instance = self._instance(event.instance)
        if instance is None:
            return
        if event.version > self.updater.version:
            self.anomalies["version_never_published"] += 1
        elif not self.updater.updated(instance, event.version, self._out):
            self.anomalies["update_not_asked_for"] += 1

    def _woke(self, event: Woke, now: float) -> None:
        for who in self.backoff.rested(now):
            if isinstance(who, Instance):
                if who.status is not InstanceStatus.LOST:
                    self.fleet.touch(who)
            elif who.state is PARKED and who.group.active:
                self._return(who)
        self._woken_by(self.backoff.next_wake())

    # -- what becomes of an attempt --------------------------------------------------------

    def _tokens_arrived(self, event: TokensArrived, now: float) -> None:
        attempt = self._attempt(event)
        if attempt is None or attempt.disowned:
            return
        if not attempt.tokens <= event.tokens <= attempt.max_new_tokens:
            self.anomalies["tokens_out_of_range"] += 1
            return
        attempt.tokens = event.tokens
        self._learn(attempt.request.group)
        self._expect(attempt.request)

    def _request_finished(self, event: RequestFinished, now: float) -> None:
        attempt = self._close(event, now)
        if attempt is None:
            return
        request = attempt.request
        spent = event.reason == "length" and attempt.tokens >= attempt.max_new_tokens
        if spent and request.response_tokens < request.group.max_tokens:
            self._segment_ended(request)
        else:
            self._finish(request, event.reason)

    def _turn_finished(self, event: TurnFinished, now: float) -> None:
        attempt = self._close(event, now)
        if attempt is None:
            return
        request = attempt.request
        if request.response_tokens >= request.group.max_tokens or not self._room_for(request):
            self._finish(request, "length")
        else:
            move(request, ACT)
            request.turn += 1

    def _tool_returned(self, event: ToolReturned, now: float) -> None:
        request = self.requests.get(event.request)
        if request is None or request.state is not ACTING or request.last_attempt != event.attempt:
            self.anomalies["unknown_turn"] += 1
            return
        if event.observation_tokens < 0:
            self.anomalies["tokens_out_of_range"] += 1
        request.context_tokens += max(0, event.observation_tokens)
        self._go_on(request)

    def _request_interrupted(self, event: RequestInterrupted, now: float) -> None:
        attempt = self._close(event, now)
        if attempt is not None:
            self._go_on(attempt.request)

    def _request_failed(self, event: RequestFailed, now: float) -> None:
        attempt = self._attempt(event)
        if attempt is None:
            return
        request, instance = attempt.request, attempt.instance
        if event.blame == "instance" and not instance.rests_until:
            # What fails while it rests was sent before: the same incident, however many there are.
            self._rest(instance, now)
        self._free(attempt)
        if attempt.disowned:
            self._waste(attempt, attempt.disowned)
            return
        if not event.usable:
            self._waste(attempt, "untrue")
            attempt.tokens = 0
        self._keep(attempt, ())
        if event.blame == "unclear":
            blame.suspect(request, instance)
        if event.blame == "request" or request.failures >= self.max_failures:
            self._give_up(request)
            return
        if event.blame == "unclear" and not self._may_try_elsewhere(request):
            self._rest_request(request, now)
        self._go_on(request)

    # -- attempts: closing and keeping what they made --------------------------------------

    def _attempt(self, event: Answered | TokensArrived) -> Attempt | None:
        attempt = self.fleet.attempts.get(event.attempt)
        if attempt is None or attempt.request.id != event.request:
            self.anomalies["unknown_attempt"] += 1
            return None
        return attempt

    def _close(
        self, event: RequestFinished | TurnFinished | RequestInterrupted, now: float
    ) -> Attempt | None:
        """Free the slot and keep the tokens; None if nobody wants this answer any more."""
        attempt = self._attempt(event)
        if attempt is None:
            return None
        blame.acquit(attempt.instance)
        self._free(attempt)
        tokens = event.tokens
        if not 0 <= tokens <= attempt.max_new_tokens:
            self.anomalies["tokens_out_of_range"] += 1
            tokens = min(max(0, tokens), attempt.max_new_tokens)
        attempt.tokens = tokens
        if attempt.disowned:
            self._waste(attempt, attempt.disowned)
            return None
        if attempt.request.failed_on:
            for instance in blame.succeed(attempt.request, self.fleet.instances):
                self._rest(instance, now)
        self._keep(attempt, event.spans)
        return attempt

    def _free(self, attempt: Attempt) -> None:
        """The instance holds the attempt no longer."""
        instance = attempt.instance
        self.fleet.close(attempt)
        if not instance.attempts:
            self._stirred |= self.updater.emptied(instance, self._out)
            if instance.leaving:
                self._out.append(Release(instance.id))

    def _waste(self, attempt: Attempt, reason: str) -> None:
        """What an attempt made that nobody wants."""
        if attempt.tokens:
            name = attempt.request.id
            self._out.append(Discard(name, attempt.tokens, reason, attempt=attempt.id))

    def _keep(self, attempt: Attempt, spans: Spans) -> None:
        """Add what the attempt made to its request."""
        request = attempt.request
        request.attempt = None
        if not attempt.tokens:
            return
        for version, tokens in self._true_spans(attempt, spans):
            request.segments += (Segment(version, tokens, attempt.instance.id),)
            if not request.group.direct:
                self.sample_buffer.stamp(request.group, version)
        request.response_tokens += attempt.tokens
        request.context_tokens += attempt.tokens
        request.computed_tokens = request.context_tokens

    def _true_spans(self, attempt: Attempt, spans: Spans) -> Spans:
        """The spans the instance reported, or the oldest version they can be if they lie.

        Our own book says what was loaded there when; a span outside of it is an anomaly.
        """
        if not spans:
            return ((attempt.version, attempt.tokens),)
        if len(spans) == 1 and spans[0] == (attempt.version, attempt.tokens):
            return spans
        versions = [version for version, _ in spans]
        if (
            sum(tokens for _, tokens in spans) != attempt.tokens
            or any(tokens < 0 for _, tokens in spans)
            or versions != sorted(versions)
            or versions[-1] > attempt.instance.version
        ):
            self.anomalies["spans_do_not_fit"] += 1
            return ((attempt.version, attempt.tokens),)
        if versions[0] < attempt.version:
            self.anomalies["version_older_than_dispatched"] += 1
        return tuple(span for span in spans if span[1])

    def _disown(self, request: Request, reason: str) -> None:
        """Nobody wants what the request's attempt will answer; the slot frees when it does."""
        attempt = request.attempt
        if attempt is None:
            return
        attempt.disowned = reason
        request.attempt = None
        if request.state is RUNNING:
            self._out.append(Interrupt(request.id, attempt.id, attempt.instance.id))

    # -- requests: going on, finishing, ending ---------------------------------------------

    def _go_on(self, request: Request) -> None:
        """To the waiting queue if its group is on, to the replay buffer if it was set back."""
        if request.response_tokens >= request.group.max_tokens or not self._room_for(request):
            self._finish(request, "length")
        elif request.group.active and not request.rests_until:
            self._return(request)
        else:
            self._park(request)

    def _room_for(self, request: Request) -> int:
        """Tokens that still fit beside its context; observations may have filled the KV cache."""
        kv_tokens = self.fleet.kv_tokens
        if kv_tokens is None:
            return request.group.max_tokens
        return max(0, kv_tokens - request.context_tokens)

    def _segment_ended(self, request: Request) -> None:
        """It used up the tokens of one attempt; in rounds it goes on in the next."""
        if self.roles.batching.stops_at_delivery and not request.group.direct:
            self._park(request)
        else:
            self._go_on(request)

    def _return(self, request: Request) -> None:
        self.replay_buffer.discard(request)
        request.rests_until = 0.0
        move(request, RETURN)
        request.expected_tokens = self.roles.prediction.expect(request)
        self.waiting.add(request, self.roles.ordering.key(request))

    def _park(self, request: Request) -> None:
        if request.state is WAITING:
            self.waiting.remove(request)
        move(request, PARK)
        self.replay_buffer.add(request)

    def _finish(self, request: Request, reason: str) -> None:
        move(request, FINISH)
        request.finish = reason
        if request.failed_on:
            blame.forget(request, self.fleet.instances)
        group = request.group
        group.finished.append(request)
        insort(group.lengths, request.response_tokens)
        if group.direct:
            self._answer(request)
        elif group.complete:
            self._complete(group)
        else:
            self._learn(group)

    def _end(self, request: Request, reason: str) -> None:
        """The request is over without being delivered."""
        self._disown(request, reason)
        if request.failed_on:
            blame.forget(request, self.fleet.instances)
        if request.state is WAITING:
            self.waiting.remove(request)
        elif request.state is PARKED:
            self.replay_buffer.remove(request)
        move(request, END)
        del self.requests[request.id]
        self._out.append(Discard(request.id, request.response_tokens, reason, ends=True))

    def _learn(self, group: Group) -> None:
        """A member made progress; if that changes what to expect, ask again for the others."""
        lesson = self.roles.prediction.lesson(group)
        if lesson == group.lesson:
            return
        group.lesson = lesson
        if not self.waiting and not self._weigh_tokens:
            return  # nobody looks at what is expected of those that run
        for request in group.requests:
            if request.state is WAITING or request.attempt is not None:
                self._expect(request)

    def _expect(self, request: Request) -> None:
        """What is expected of a running request matters only where tokens are weighed."""
        attempt = request.attempt
        if attempt is not None and not self._weigh_tokens:
            return
        expected = self.roles.prediction.expect(request)
        if expected == request.expected_tokens:
            return
        request.expected_tokens = expected
        if attempt is not None:
            self.fleet.expect(attempt, expected - request.response_tokens)
        else:
            self.waiting.rerank(request, self.roles.ordering.key(request))

    # -- groups ----------------------------------------------------------------------------

    def _activate(self, group: Group, oversample: float) -> None:
        """Launch a group: make it whole in requests and let them be dispatched."""
        group.active = True
        self.progress.active += 1
        self.sample_buffer.hold(group)
        wanted = ceil(group.samples * oversample - 1e-9)
        used = {request.index for request in group.requests}
        index = 0
        while len(group.requests) < wanted:
            if index not in used:
                self._create(group, index, f"{group.id}/{index}")
            index += 1
        for request in self.replay_buffer.of(group):
            self._return(request)

    def _create(self, group: Group, index: int, name: str) -> Request:
        """A new request, parked until it is let go in the same breath."""
        request = Request(name, group, index, self._next_serial(), group.prompt_tokens)
        self.requests[name] = request
        group.requests.append(request)
        return request

    def _complete(self, group: Group) -> None:
        self._stirred = True
        if group.active:
            group.active = False
            self.progress.active -= 1
        else:
            del self.progress.deferred_groups[group.id]
        for request in group.requests:
            if request.state is not FINISHED:
                self._end(request, "surplus")
        group.requests = list(group.finished)
        self.sample_buffer.completed(group)

    def _set_back(self, group: Group) -> None:
        """The round is over without this group: keep its partial requests, or start it over."""
        if not self.roles.interruption.keeps_partial:
            self._start_over(group, "deferred")
            return
        self._defer(group)
        for request in group.requests:
            if request.state is WAITING:
                self._park(request)
            elif request.state is RUNNING:
                attempt = request.attempt
                assert attempt is not None
                move(request, INTERRUPT)
                self._out.append(Interrupt(request.id, attempt.id, attempt.instance.id))

    def _start_over(self, group: Group, reason: str = "stale") -> None:
        """Throw away every token of a group and queue it for a later launch."""
        self._stirred = True
        if group.id not in self.progress.deferred_groups:
            self._defer(group)
        for request in group.requests[group.samples :]:
            self._end(request, reason)
        del group.requests[group.samples :]
        for request in group.requests:
            self._disown(request, reason)
            if request.response_tokens:
                self._out.append(Discard(request.id, request.response_tokens, reason))
            request.context_tokens = group.prompt_tokens
            request.response_tokens = request.computed_tokens = request.turn = 0
            request.salt = request.home = None
            request.finish = ""
            request.segments = ()
            if request.state is not PARKED:
                self._park(request)
        group.finished.clear()
        group.lengths.clear()
        group.lesson = None
        self.sample_buffer.release(group)

    def _defer(self, group: Group) -> None:
        if group.active:
            group.active = False
            self.progress.active -= 1
        group.deferrals += 1
        self.progress.deferred_groups[group.id] = group

    def _answer(self, request: Request) -> None:
        """A direct request is finished: it leaves without waiting for anybody."""
        self._out.append(Answer(self._sample(request)))
        move(request, END)
        del self.requests[request.id]
        request.group.finished.clear()
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """A direct request is over; what it taught helps the siblings that are still here."""
        group = request.group
        group.requests.remove(request)
        if group.requests:
            self._learn(group)
            return
        key = (group.id, group.prompt_tokens, group.max_tokens)
        if self.direct_groups.get(key) is group:
            del self.direct_groups[key]

    def _give_up(self, request: Request) -> None:
        """It cannot be made."""
        if request.group.direct:
            self._end(request, "failed")
            self._leave(request)
        else:
            self._fail(request.group)

    def _fail(self, group: Group) -> None:
        """One request cannot be made, so the group can never be whole."""
        self._stirred = True
        if group.active:
            group.active = False
            self.progress.active -= 1
        self.progress.deferred_groups.pop(group.id, None)
        for request in group.requests:
            self._end(request, "failed")
        self._drop(group)

    def _forget(self, group: Group) -> None:
        """The group was delivered."""
        for request in group.finished:
            move(request, END)
            del self.requests[request.id]
        self._drop(group)

    def _drop(self, group: Group) -> None:
        self.sample_buffer.release(group)
        del self.groups[group.id]
        # No cycle is left behind, so memory does not wait for the garbage collector.
        group.requests.clear()
        group.finished.clear()

    def _sample(self, request: Request) -> Sample:
        versions = [segment.version for segment in request.segments]
        oldest = min(versions, default=self.progress.version)
        return Sample(
            request.id,
            request.group.id,
            request.index,
            request.group.prompt_tokens,
            request.response_tokens,
            request.segments,
            self.progress.version - oldest,
            request.finish,
        )

    # -- instances -------------------------------------------------------------------------

    def _instance(self, name: str) -> Instance | None:
        instance = self.fleet.instances.get(name)
        if instance is None:
            self.anomalies["unknown_instance"] += 1
        return instance

    def _lose(self, instance: Instance) -> None:
        self.updater.lost(instance)
        lost = self.fleet.lose(instance)
        attempts = [attempt for attempt in lost if not attempt.disowned]
        for attempt in lost:
            if attempt.disowned:
                self._waste(attempt, attempt.disowned)
            else:
                self._keep(attempt, ())
        for attempt in attempts:
            # The first to go on may complete its group and so end a sibling that was here too.
            if attempt.request.state in (RUNNING, INTERRUPTING):
                self._go_on(attempt.request)

    # -- resting ---------------------------------------------------------------------------

    def _may_try_elsewhere(self, request: Request) -> bool:
        """Once, and only where it has not failed: who fails more often waits."""
        return request.failures == 1 and len(self.fleet.instances) > len(request.failed_on)

    def _rest_request(self, request: Request, now: float) -> None:
        """It may be at fault, so it waits before it is tried once more."""
        self._woken_by(self.backoff.rest(request, request.failures - 1, now))

    def _rest(self, instance: Instance, now: float) -> None:
        """Give an instance that is at fault time to recover before it gets more work."""
        wake = self.backoff.rest(instance, instance.rests, now)
        instance.rests += 1
        instance.faults = 0
        self.fleet.touch(instance)
        self._woken_by(wake)

    def _woken_by(self, wake: Wake | None) -> None:
        if wake is not None:
            self._out.append(wake)

    def _check_fits(self, kind: str, name: str, tokens: int, kv_tokens: int | None) -> None:
        if kv_tokens is not None and tokens > kv_tokens:
            raise CallerError(
                f"{kind} {name!r}: prompt_tokens + max_tokens is {tokens}, but an instance holds "
                f"only {kv_tokens} KV tokens, so it could never run there; lower max_tokens or "
                f"give the instances more KV memory"
            )

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial


#: What each event does. No table of bound methods in each scheduler: that would be a cycle.
_APPLY: dict[type[Any], Callable[[Scheduler, Any, float], None]] = {
    InstanceJoined: Scheduler._instance_joined,
    InstanceLost: Scheduler._instance_lost,
    InstanceLeaving: Scheduler._instance_leaving,
    InstanceReported: Scheduler._instance_reported,
    GroupSubmitted: Scheduler._group_submitted,
    RequestSubmitted: Scheduler._request_submitted,
    RequestWithdrawn: Scheduler._request_withdrawn,
    SessionEnded: Scheduler._session_ended,
    SubmissionsClosed: Scheduler._submissions_closed,
    TokensArrived: Scheduler._tokens_arrived,
    RequestFinished: Scheduler._request_finished,
    TurnFinished: Scheduler._turn_finished,
    ToolReturned: Scheduler._tool_returned,
    RequestInterrupted: Scheduler._request_interrupted,
    RequestFailed: Scheduler._request_failed,
    WeightsPublished: Scheduler._weights_published,
    InstancePaused: Scheduler._instance_paused,
    WeightsUpdated: Scheduler._weights_updated,
    BatchRequested: Scheduler._batch_requested,
    Woke: Scheduler._woke,
}
