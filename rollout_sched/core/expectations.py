"""Expected lengths of requests, and the order in which they wait, which may depend on these."""

from __future__ import annotations

from typing import Any

from rollout_sched.core.fleet import Fleet
from rollout_sched.core.lifecycle import WAITING
from rollout_sched.core.model import Request, Siblings
from rollout_sched.core.roles import Roles
from rollout_sched.core.waiting import WaitingQueue


class Expectations:
    """Asks the prediction for lengths, and the ordering for the keys of waiting requests. It asks
    again when the inputs of either change."""

    def __init__(self, roles: Roles, fleet: Fleet, waiting: WaitingQueue) -> None:
        self._prediction = roles.prediction
        self._ordering = roles.ordering
        self._weigh_tokens = roles.weigh_tokens
        self._sessions = roles.sessions
        self._prioritised = False
        self._fleet = fleet
        self._waiting = waiting

    def enqueue(self, request: Request) -> None:
        """The request waits from now on."""
        request.expected_tokens = self._prediction.expect(request)
        if request.priority and not self._prioritised:
            self._prioritise()
        self._waiting.add(request, self._key(request))

    def rerank(self, request: Request) -> None:
        """Something changed that the waiting order may depend on."""
        self._waiting.rerank(request, self._key(request))

    def learn(self, siblings: Siblings) -> None:
        """One sibling made progress; if the estimate changes, ask again for the others."""
        estimate = self._prediction.estimate(siblings)
        if estimate == siblings.estimate:
            return
        siblings.estimate = estimate
        if self._waiting.size:
            for request in siblings.requests:
                if request.state is WAITING:
                    self._expect_waiting(request)
        if self._weigh_tokens:
            for request in siblings.requests:
                self.expect_running(request)

    def expect_running(self, request: Request) -> None:
        """Update the expected tokens of a request in flight, if any role weighs tokens."""
        attempt = request.attempt
        if attempt is None or not self._weigh_tokens:
            return
        expected = self._prediction.expect(request)
        if expected != request.expected_tokens:
            request.expected_tokens = expected
            self._fleet.expect(attempt, expected - request.response_tokens)

    def _expect_waiting(self, request: Request) -> None:
        expected = self._prediction.expect(request)
        if expected != request.expected_tokens:
            request.expected_tokens = expected
            self.rerank(request)

    def _prioritise(self) -> None:
        """Put priorities into the keys, from the first request that has one."""
        self._prioritised = True
        for request in list(self._waiting):
            self.rerank(request)
        self._waiting.rebuild()

    def _key(self, request: Request) -> Any:
        """If sessions are bounded, requests that go on where their KV is pass first."""
        key = self._ordering.key(request)
        if self._prioritised:
            key = (request.priority, key)
        return key if self._sessions is None else (request.home is None, key)
