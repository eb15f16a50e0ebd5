"""The requests that have not ended, and their moves through `lifecycle.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollout_sched.core.model.actions import Interrupt
from rollout_sched.core.model.model import Group, Request, Siblings
from rollout_sched.core.state.lifecycle import END, INTERRUPT, PARK, PARKED, RETURN, WAITING, move
from rollout_sched.core.state.state import State
from rollout_sched.core.state.waiting import FairQueue, ReplayBuffer
from rollout_sched.core.work import attempts as blame
from rollout_sched.core.work.attempts import AttemptLedger, discard


class Expectations:
    """Asks the prediction for lengths, and the ordering for the keys of waiting requests. It asks
    again when the inputs of either change."""

    def __init__(self, state: State, waiting: FairQueue) -> None:
        roles = state.roles
        self._prediction = roles.prediction
        self._ordering = roles.ordering
        self._weigh_tokens = roles.weigh_tokens
        self._sessions = roles.sessions
        self._prioritised = False
        self._fleet = state.fleet
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
        return key if self._sessions is None else (request.kv_instance is None, key)


class Requests:
    """Every request that has not ended, by id, with the waiting queue and the replay buffer."""

    def __init__(self, state: State, ledger: AttemptLedger) -> None:
        self.waiting = state.waiting
        self.expectations = Expectations(state, self.waiting)
        self.replay_buffer = ReplayBuffer()
        self._all: dict[str, Request] = {}
        self._sessions = state.roles.sessions
        self._state = state
        self._fleet = state.fleet
        self._ledger = ledger

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request: str) -> bool:
        return request in self._all

    def __iter__(self) -> Iterator[Request]:
        return iter(self._all.values())

    def __getitem__(self, request: str) -> Request:
        return self._all[request]

    def get(self, request: str) -> Request | None:
        return self._all.get(request)

    # -- moves -----------------------------------------------------------------------------

    def create(self, siblings: Siblings, group: Group | None, index: int, name: str) -> Request:
        """A new request, parked until the caller moves it on, within the same event."""
        serial = self._state.serials.next()
        request = Request(name, siblings, group, index, serial, siblings.prompt_tokens)
        self.add(request)
        return request

    def add(self, request: Request) -> None:
        """Add a request that is known by its id from now on."""
        self._all[request.id] = request
        request.siblings.requests.append(request)

    def wait(self, request: Request) -> None:
        """The request may be dispatched (again)."""
        self.replay_buffer.discard(request)
        request.rests_until = 0.0
        kv_instance = request.kv_instance
        if (
            kv_instance is not None
            and self._sessions is not None
            and not self._sessions.continues(kv_instance)
        ):
            self._fleet.release_kv(request)
        move(request, RETURN)
        self.expectations.enqueue(request)

    def rested(self, request: Request) -> None:
        """The rest of the request is over. A direct request that has failed moves behind all that
        came meanwhile, so that one that keeps failing delays no other; the trainer's keep their
        order.
        """
        if request.group is None and request.failures:
            request.serial = self._state.serials.next()
        self.wait(request)

    def leave_home(self, request: Request) -> None:
        """The instance that kept the KV of the request is gone."""
        self._fleet.release_kv(request)
        if request.state is WAITING:
            self.expectations.rerank(request)

    def park(self, request: Request) -> None:
        self._fleet.release_kv(request)
        if request.state is WAITING:
            self.waiting.remove(request)
        move(request, PARK)
        self.replay_buffer.add(request)

    def interrupt(self, request: Request) -> None:
        """Tell the attempt of a running request to stop."""
        attempt = request.attempt
        assert attempt is not None
        move(request, INTERRUPT)
        self._state.orders.append(Interrupt(request.id, attempt.id, attempt.instance.id))

    def start_over(self, request: Request, reason: str) -> None:
        """Throw away all tokens of the request, and park it."""
        self._ledger.abandon(request, reason)
        if request.response_tokens or request.turn:
            self._state.orders.append(discard(request, request.response_tokens, reason))
        request.context_tokens = request.siblings.prompt_tokens
        request.response_tokens = request.computed_tokens = 0
        request.turn = request.migrations = 0
        request.salt = request.last_instance = None
        request.finish = ""
        request.segments = ()
        if request.state is not PARKED:
            self.park(request)

    def end(self, request: Request, reason: str) -> None:
        """The request ends without being delivered or answered."""
        self._ledger.abandon(request, reason)
        self._fleet.release_kv(request)
        if request.failed_on:
            blame.forget(request, self._fleet.instances)
        self.leave_queues(request)
        self.forget(request)
        self._state.orders.append(discard(request, request.response_tokens, reason, ends=True))

    def leave_queues(self, request: Request) -> None:
        """The request is not dispatched again."""
        if request.state is WAITING:
            self.waiting.remove(request)
        elif request.state is PARKED:
            self.replay_buffer.remove(request)

    def forget(self, request: Request) -> None:
        """The request has ended: delivered, answered or discarded."""
        move(request, END)
        del self._all[request.id]

    # -- whether they can go on ------------------------------------------------------------

    def room_for(self, request: Request) -> int:
        """Tokens it may still make; observations may have filled the longest context."""
        remaining = request.siblings.max_tokens - request.response_tokens
        most = self._fleet.contexts.most
        if not most or request.context_tokens + remaining <= most:
            return remaining
        return max(0, most - request.context_tokens)
