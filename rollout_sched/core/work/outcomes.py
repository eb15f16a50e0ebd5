"""What happens to requests between attempts: they go on, are finished, or are given up."""

from __future__ import annotations

from bisect import insort
from math import ceil
from typing import Literal

from msgspec.structs import replace

from rollout_sched.core.model.actions import Answer, Judge
from rollout_sched.core.model.events import GroupJudged
from rollout_sched.core.model.model import Group, Request
from rollout_sched.core.model.records import DeliveredSample, Segment
from rollout_sched.core.model.request_ids import request_id
from rollout_sched.core.state.groups import (
    ACTIVE,
    DEFERRED,
    DELIVER,
    FAIL,
    FILL,
    FILTER,
    JUDGE,
    KEEP,
    LAUNCH,
    SET_BACK,
    SPEND,
)
from rollout_sched.core.state.lifecycle import FINISH, FINISHED, PARKED, RUNNING, WAITING, move
from rollout_sched.core.state.state import State
from rollout_sched.core.work import attempts as blame
from rollout_sched.core.work.requests import Requests


class FinishedSamples:
    """Builds the samples of finished requests when they go to the trainer, to a client, or to be
    judged: not before, because their age depends on the trainer's version."""

    def __init__(self, state: State) -> None:
        self._state = state

    def sample_of(self, request: Request) -> DeliveredSample:
        segments = request.segments
        if self._state.roles.freshness.masks and request.group is not None:
            segments = self._masked(segments)
        newest = self._state.progress.version
        oldest: int | None = None
        masked = 0
        for segment in segments:
            if segment.masked:
                masked += segment.tokens
            elif oldest is None or segment.version < oldest:
                oldest = segment.version
        return DeliveredSample(
            request.id,
            request.siblings.id,
            request.index,
            request.siblings.prompt_tokens,
            request.response_tokens,
            segments,
            0 if oldest is None else newest - oldest,
            request.finish,
            masked,
        )

    def judge(self, group: Group) -> None:
        """Ask whether a whole group is to be trained."""
        group.judgement = self._state.serials.next()
        samples = tuple([self.sample_of(request) for request in group.finished])
        self._state.orders.append(Judge(group.id, group.judgement, samples))

    def _masked(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        oldest = self._state.roles.freshness.oldest_allowed(self._state.progress.version)
        return tuple(
            [replace(one, masked=True) if one.version < oldest else one for one in segments]
        )


class GroupMoves:
    """Moves groups through `groups.py`, and moves their requests accordingly.

    budgeted  whether a group has a token budget for each round
    """

    def __init__(self, state: State, requests: Requests, finished: FinishedSamples) -> None:
        roles = state.roles
        self.budgeted = roles.batching.stops_at_delivery and roles.interruption.budgeted
        self._state = state
        self._requests = requests
        self._finished = finished

    def launch(self, group: Group, oversample: float) -> None:
        """Create the missing requests of a group, and let all that are parked be dispatched."""
        self._state.groups.move(group, LAUNCH)
        self._state.sample_buffer.add(group)
        wanted = ceil(group.samples * oversample - 1e-9)
        used = {request.index for request in group.requests}
        index = 0
        while len(group.requests) < wanted:
            if index not in used:
                self._requests.create(group.siblings, group, index, request_id(group.id, index))
            index += 1
        for request in self._requests.replay_buffer.parked_of(group):
            self._requests.wait(request)

    def finished(self, request: Request, group: Group) -> None:
        """One sample of the group is finished."""
        self._state.groups.touch(group)
        group.finished.append(request)
        if len(group.finished) >= group.samples:
            self._fill(group)
        else:
            self._requests.expectations.learn(request.siblings)
            if self.budgeted:
                self.spend(group)

    def failed(self, request: Request, group: Group) -> None:
        """One sample of the group cannot be made: the group goes on without it, or is lost."""
        left = min(group.samples, len(group.requests) - 1)
        if not group.min_samples or left < group.min_samples:
            self.lose(group, "failed")
            return
        self._state.groups.touch(group)
        self._requests.end(request, "sample_failed")
        group.requests.remove(request)
        group.samples = left
        if len(group.finished) >= left:
            self._fill(group)
        elif self.budgeted:
            self.spend(group)

    def set_back(self, group: Group) -> None:
        """The round ended without this group: keep its partial requests, or start it over."""
        if not self._state.roles.interruption.keeps_partial:
            self.start_over(group, "deferred")
            return
        self._state.groups.move(group, SET_BACK)
        for request in group.requests:
            self._stop(request)

    def start_over(self, group: Group, reason: str = "stale") -> None:
        """Queue a group for a later launch, and throw away all its tokens."""
        self._state.progress.must_decide = True
        self._state.groups.touch(group)
        if reason == "stale":
            self._state.progress.group_lost(group)
        if group.state is not DEFERRED:
            self._state.groups.move(group, SET_BACK)
        group.judgement = 0
        requests = group.requests
        for request in requests[group.samples :]:
            self._requests.end(request, reason)
        del requests[group.samples :]
        for request in requests:
            self._requests.start_over(request, reason)
        group.finished.clear()
        group.siblings.lengths.clear()
        group.siblings.estimate = None
        self._state.sample_buffer.remove(group)

    def check_age(self, group: Group) -> None:
        """Some tokens of the group are older than expected: start it over if they are too old."""
        oldest = self._state.roles.freshness.oldest_allowed(self._state.progress.version)
        known = group.oldest_version
        if known is not None and known < oldest:
            self.start_over(group)

    def deliver(self, group: Group) -> None:
        """The samples of the group go to the trainer."""
        self._state.groups.move(group, DELIVER)
        self._state.progress.group_delivered(group)
        history = group.siblings.history
        if history is not None:
            history.note([request.response_tokens for request in group.finished])
        for request in group.finished:
            self._requests.forget(request)
        self._let_go(group)

    def lose(self, group: Group, why: Literal["failed", "filtered"]) -> None:
        """The group will never be delivered."""
        self._state.progress.must_decide = True
        self._state.progress.group_lost(group)
        self._state.groups.move(group, FAIL if why == "failed" else FILTER)
        for request in group.requests:
            self._requests.end(request, why)
        self._let_go(group)

    def spend(self, group: Group) -> None:
        """If no request of the group can go on in this round, let others start in its place."""
        if group.state is not ACTIVE:
            return
        for request in group.requests:
            parked = request.state is PARKED and not request.rests_until
            if request.state is not FINISHED and not parked:
                return  # this request goes on
        self._state.progress.must_decide = True
        self._state.groups.move(group, SPEND)

    def _fill(self, group: Group) -> None:
        self._state.progress.must_decide = True
        self._state.groups.move(group, JUDGE if group.judged else FILL)
        for request in group.requests:
            if request.state is not FINISHED:
                self._requests.end(request, "surplus")
        group.siblings.requests = list(group.finished)
        if group.judged:
            self._finished.judge(group)
        else:
            self._state.sample_buffer.completed(group)

    def _let_go(self, group: Group) -> None:
        """Break reference cycles, so that memory is freed without the garbage collector."""
        self._state.sample_buffer.remove(group)
        group.siblings.requests.clear()
        group.finished.clear()

    def _stop(self, request: Request) -> None:
        """Stop the request; it goes on in a later round. One that cannot be resumed runs on: if it
        started over in each round, one that is longer than a round would never end."""
        if request.state is WAITING:
            self._requests.park(request)
        elif request.state is RUNNING and request.resumable:
            self._requests.interrupt(request)


class RequestMoves:
    """Moves requests when an attempt, a turn or a rest is over.

    groups        the moves of their groups
    max_failures  a request that failed this often in a row is given up
    """

    def __init__(
        self,
        state: State,
        requests: Requests,
        finished: FinishedSamples,
        groups: GroupMoves,
        max_failures: int,
    ) -> None:
        self.groups = groups
        self.max_failures = max_failures
        self._state = state
        self._requests = requests
        self._finished = finished

    def requeue(self, request: Request) -> None:
        """To the waiting queue if the request may run, else to the replay buffer."""
        if request.aborted:
            self.finish(request, "abort")
        elif not self._requests.room_for(request):
            self.finish(request, "length")
        elif request.active and not request.rests_until:
            self._requests.wait(request)
        elif request.state is not PARKED:  # else it has just started over
            self._requests.park(request)

    def end_segment(self, request: Request) -> None:
        """The request has used up an attempt's tokens; the next round renews a budget."""
        if self.groups.budgeted and request.group is not None:
            self._requests.park(request)
            self.groups.spend(request.group)
        else:
            self.requeue(request)

    def finish(self, request: Request, reason: str) -> None:
        group = request.group
        move(request, FINISH)
        request.finish = reason
        self._state.fleet.finished(request)
        if request.failed_on:
            blame.forget(request, self._state.fleet.instances)
        if reason != "abort":  # else it is not the length that it would have had
            insort(request.siblings.lengths, request.response_tokens)
        if group is None:
            self._answer(request)
            return
        self.groups.finished(request, group)

    def cut_short(self, request: Request) -> None:
        """A direct request is answered with what it has, once its attempt has stopped."""
        request.aborted = True
        if request.state is RUNNING:
            self._requests.interrupt(request)
        elif request.attempt is None:
            self._requests.leave_queues(request)
            self.finish(request, "abort")

    def end_direct(self, request: Request, reason: str) -> None:
        """A direct request ends without an answer."""
        self._requests.end(request, reason)
        self._leave(request)

    def give_up(self, request: Request) -> None:
        """The request cannot be made."""
        if request.group is None:
            self.end_direct(request, "failed")
        else:
            self.groups.failed(request, request.group)

    def _answer(self, request: Request) -> None:
        """A direct request is finished: answer it at once."""
        self._state.orders.append(Answer(self._finished.sample_of(request)))
        self._requests.forget(request)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Remove a finished request from its siblings, whose prediction learns its length."""
        self._state.siblings.leave(request)
        if request.siblings.requests:
            self._requests.expectations.learn(request.siblings)


# ------------------------------------------------------------------------------------------
# Judged groups: kept, filtered or failed.
#
# The core knows neither rewards nor their purpose. It knows that a whole group waits for an answer
# whether it is to be trained, and that the group holds no slot meanwhile, but ages.
#
# A state of groups, not of requests: to keep or not is about a group, so it would have to wait all
# the same, and over-sampling would have to choose between finished and judged requests. The
# question has a number, so an answer to an earlier one is ignored; after a restart it is asked
# again. The driver begins a sample's reward when the sample has finished, without asking. A reward
# that fails is reported when the group is whole: its siblings are generated to the end, which costs
# their tokens, but only if a grader fails for good.


class Judgement:
    """Takes the answers to Judge; an answer to an earlier question about the group is ignored."""

    def __init__(self, state: State, outcomes: GroupMoves) -> None:
        self._state = state
        self._outcomes = outcomes

    def judged(self, event: GroupJudged, now: float) -> None:
        group = self._state.groups.get(event.group)
        if group is None or not event.judgement or group.judgement != event.judgement:
            self._state.anomalies["unknown_judgement"] += 1
            return
        group.judgement = 0
        if event.verdict == "kept":
            self._state.progress.must_decide = True
            self._state.groups.move(group, KEEP)
            self._state.sample_buffer.completed(group)
        else:
            self._outcomes.lose(group, event.verdict)
