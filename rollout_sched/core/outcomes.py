"""What happens to requests between attempts: they go on, are finished, or are given up."""

from __future__ import annotations

from bisect import insort

from rollout_sched.core import blame
from rollout_sched.core.actions import Action, Answer
from rollout_sched.core.finished_samples import FinishedSamples
from rollout_sched.core.fleet import Fleet
from rollout_sched.core.group_outcomes import GroupOutcomes
from rollout_sched.core.groups import (
    DEFERRED,
)
from rollout_sched.core.lifecycle import FINISH, move
from rollout_sched.core.model import Group, Request
from rollout_sched.core.requests import Requests
from rollout_sched.core.siblings import DirectSiblings
from rollout_sched.core.verification import Verification


class Outcomes:
    """Moves requests when an attempt, a turn or a rest is over.

    groups        the moves of their groups
    max_failures  a request that failed this often in a row is given up
    """

    def __init__(
        self,
        groups: GroupOutcomes,
        fleet: Fleet,
        requests: Requests,
        siblings: DirectSiblings,
        finished: FinishedSamples,
        verification: Verification,
        max_failures: int,
        out: list[Action],
    ) -> None:
        self.groups = groups
        self.max_failures = max_failures
        self._budgeted = groups.budgeted
        self._fleet = fleet
        self._requests = requests
        self._siblings = siblings
        self._finished = finished
        self._verification = verification
        self._out = out

    def go_on(self, request: Request) -> None:
        """To the waiting queue if the request may run, else to the replay buffer."""
        if not self._requests.room_for(request):
            self.finish(request, "length")
        elif request.active and not request.rests_until:
            self._requests.wait(request)
        else:
            self._requests.park(request)

    def end_segment(self, request: Request) -> None:
        """It used up the tokens of one attempt; the next round renews a budget."""
        request.ends = False  # it continued after its end
        if self._budgeted and request.group is not None:
            self._requests.park(request)
            self.groups.spend(request.group)
        else:
            self.go_on(request)

    def finish(self, request: Request, reason: str) -> None:
        group = request.group
        if self._verification.on and group is not None and self.groups.too_early(request, group):
            self.groups.hold(request, reason)
            if group.state is not DEFERRED:
                self._requests.wait(request)
            return
        move(request, FINISH)
        request.finish = reason
        request.ends = False
        self._fleet.finished(request)
        if request.failed_on:
            blame.forget(request, self._fleet.instances)
        insort(request.siblings.lengths, request.response_tokens)
        if group is None:
            self._answer(request)
            return
        self.groups.finished(request, group)

    def launch(self, group: Group, oversample: float) -> None:
        """Launch a group: let its requests be dispatched, and finish those that are whole."""
        for request in self.groups.launch(group, oversample):
            self._requests.replay_buffer.remove(request)
            self.finish(request, "stop")
        if self._verification.on:
            self._verification.renew(group)  # a tool may still be at work on old tokens

    def end_direct(self, request: Request, reason: str) -> None:
        """A direct request ends without an answer."""
        self._requests.end(request, reason)
        self._leave(request)

    def give_up(self, request: Request) -> None:
        """The request cannot be made, so its group can never be whole."""
        if request.group is None:
            self.end_direct(request, "failed")
        else:
            self.groups.lose(request.group, "failed")

    def _answer(self, request: Request) -> None:
        """A direct request is finished: answer it at once."""
        self._out.append(Answer(self._finished.of(request)))
        self._requests.forget(request)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Its length updates the prediction for its remaining siblings."""
        self._siblings.leave(request)
        if request.siblings.requests:
            self._requests.expectations.learn(request.siblings)
