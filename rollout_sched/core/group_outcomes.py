"""The moves of groups: launched, set back, started over, whole, delivered or lost."""

from __future__ import annotations

from math import ceil
from typing import Literal

from rollout_sched.core.finished_samples import FinishedSamples
from rollout_sched.core.groups import (
    ACTIVE,
    DEFERRED,
    DELIVER,
    FAIL,
    FILL,
    FILTER,
    JUDGE,
    LAUNCH,
    SET_BACK,
    SPEND,
    Groups,
)
from rollout_sched.core.lifecycle import FINISHED, PARKED, RUNNING, WAITING
from rollout_sched.core.model import Group, Request
from rollout_sched.core.progress import RunProgress
from rollout_sched.core.requests import Requests
from rollout_sched.core.roles import Roles
from rollout_sched.core.sample_buffer import SampleBuffer
from rollout_sched.core.verification import Verification


class GroupOutcomes:
    """Moves groups through `groups.py`, and moves their requests accordingly.

    budgeted  whether a group has a token budget for each round
    """

    def __init__(
        self,
        roles: Roles,
        groups: Groups,
        requests: Requests,
        samples: SampleBuffer,
        finished: FinishedSamples,
        verification: Verification,
        progress: RunProgress,
    ) -> None:
        self.budgeted = roles.batching.stops_at_delivery and roles.interruption.budgeted
        self._roles = roles
        self._groups = groups
        self._requests = requests
        self._samples = samples
        self._finished = finished
        self._verification = verification
        self._progress = progress

    def launch(self, group: Group, oversample: float) -> list[Request]:
        """Create the missing requests of a group and let them be dispatched. Returns those whose
        response is whole already and needs no verification, because there are no newer weights."""
        self._groups.move(group, LAUNCH)
        self._samples.add(group)
        wanted = ceil(group.samples * oversample - 1e-9)
        used = {request.index for request in group.requests}
        index = 0
        while len(group.requests) < wanted:
            if index not in used:
                self._requests.create(group.siblings, group, index, f"{group.id}/{index}")
            index += 1
        whole: list[Request] = []
        for request in self._requests.replay_buffer.of(group):
            if request.ends and _oldest(request) >= self._progress.fleet_version:
                whole.append(request)
            else:
                self._requests.wait(request)
        return whole

    def finished(self, request: Request, group: Group) -> None:
        """One sample of the group is finished."""
        if self._verification.on:
            self._verification.renew(group)
        self._groups.touch(group)
        group.finished.append(request)
        if len(group.finished) >= group.samples:
            self._fill(group)
        else:
            self._requests.expectations.learn(request.siblings)
            if self.budgeted:
                self.spend(group)

    def set_back(self, group: Group) -> None:
        """The round ended without this group: keep its partial requests, or start it over."""
        if self._verification.on or not self._roles.interruption.keeps_partial:
            self.start_over(group, "deferred")
            return
        self._groups.move(group, SET_BACK)
        for request in group.requests:
            self._stop(request)

    def start_over(self, group: Group, reason: str = "stale") -> None:
        """Queue a group for a later launch and throw away all its tokens. If the policy verifies,
        the tokens stay as drafts, those of finished samples included."""
        self._progress.dirty = True
        self._groups.touch(group)
        if reason == "stale":
            self._progress.group_lost(group)
        if group.state is not DEFERRED:
            self._groups.move(group, SET_BACK)
        group.judgement = 0
        requests = group.requests
        for request in requests[group.samples :]:
            self._requests.end(request, reason)
        del requests[group.samples :]
        for request in requests:
            if self._verification.on:
                self._set_aside(request)
            else:
                self._requests.start_over(request, reason)
        group.finished.clear()
        group.siblings.lengths.clear()
        group.siblings.estimate = None
        self._samples.remove(group)

    def check_age(self, group: Group) -> None:
        """Some tokens of the group are older than expected: start it over if they are too old."""
        oldest = self._roles.freshness.oldest_allowed(self._progress.version)
        known = group.oldest_version
        if group in self._samples and known is not None and known < oldest:
            self.start_over(group)

    def deliver(self, group: Group) -> None:
        """The samples of the group go to the trainer."""
        self._groups.move(group, DELIVER)
        self._progress.group_delivered(group)
        history = group.siblings.history
        if history is not None:
            history.note([request.response_tokens for request in group.finished])
        for request in group.finished:
            self._requests.forget(request)
        self._let_go(group)

    def lose(self, group: Group, why: Literal["failed", "filtered"]) -> None:
        """The group will never be delivered."""
        self._progress.dirty = True
        self._progress.group_lost(group)
        self._groups.move(group, FAIL if why == "failed" else FILTER)
        for request in group.requests:
            self._requests.end(request, why)
        self._let_go(group)

    def spend(self, group: Group) -> None:
        """If no request of the group can go on in this round, let others start in its place."""
        if group.state is not ACTIVE:
            return
        for request in group.requests:
            parked = request.state is PARKED and not request.rests_until
            if request.state is not FINISHED and (request.ends or not parked):
                return  # this request goes on, or is whole and about to finish
        self._progress.dirty = True
        self._groups.move(group, SPEND)

    def _fill(self, group: Group) -> None:
        self._progress.dirty = True
        self._groups.move(group, JUDGE if group.judged else FILL)
        for request in group.requests:
            if request.state is not FINISHED:
                self._requests.end(request, "surplus")
        group.siblings.requests = list(group.finished)
        if group.judged:
            self._finished.judge(group)
        else:
            self._samples.completed(group)

    def _let_go(self, group: Group) -> None:
        """Break reference cycles, so that memory is freed without the garbage collector."""
        self._samples.remove(group)
        group.siblings.requests.clear()
        group.finished.clear()

    # -- tokens that are too old, if the policy verifies -----------------------------------

    def too_early(self, request: Request, group: Group) -> bool:
        """Whether the request would be too old at delivery: its round is over, or its last tool
        took longer than its tokens may wait."""
        if group.state is DEFERRED:
            return True
        if self._roles.masks:
            return False
        oldest = self._roles.freshness.oldest_allowed(self._progress.version)
        return any(segment.version < oldest for segment in request.segments)

    def hold(self, request: Request, reason: str) -> None:
        """The request has finished, but too early: park it until its response is verified."""
        if self._verification.hold(request, reason, self._requests.room_for(request)):
            request.finish = ""
            self._requests.park(request)
        else:
            self._requests.start_over(request, "rejected")

    def _set_aside(self, request: Request) -> None:
        """The tokens of the request are a draft from now on."""
        if request.state is FINISHED:
            self.hold(request, request.finish)
        else:
            self._stop(request)

    def _stop(self, request: Request) -> None:
        """Stop the request; it goes on in a later round."""
        if request.state is WAITING:
            self._requests.park(request)
        elif request.state is RUNNING:
            self._requests.interrupt(request)


def _oldest(request: Request) -> int:
    return min([segment.version for segment in request.segments])
