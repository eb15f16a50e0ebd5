"""Clients get equal parts of the fleet, the trainer its own part, whatever one of them asks for."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sched.core.model.actions import Dispatch, Interrupt
from rollout_sched.core.model.events import (
    BatchRequested,
    Event,
    GroupSubmitted,
    InstanceReported,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    RequestWithdrawn,
)
from rollout_sched.core.model.model import Attempt, RequestState
from rollout_sched.core.model.records import ONE_IN
from rollout_sched.core.state.waiting import BESIDE_S, MOST_CLIENTS, TRAINER_SHARE
from tests.core.told import FULLY_ASYNC, LIMIT, PROMPT, Told

POLICIES = ["slots", "unbounded", "kv_tokens"]


class Fleet:
    """One instance whose requests take a second per token; each client keeps `open` of them.
    `answers`: to interruptions, at once."""

    answers = True

    def __init__(self, slots: int = 16, **roles: Any) -> None:
        self.told = Told(4, slots=slots, **roles)
        self.served: Counter[str] = Counter()
        self.waited: dict[str, list[float]] = {}
        self._names = count()
        self._ends: list[tuple[float, int, str]] = []
        self._asked: dict[str, tuple[str, int, float]] = {}
        self._began: dict[int, tuple[str, float]] = {}

    def ask(self, client: str, tokens: int, open: int = 1, **other: Any) -> list[str]:
        names = [f"r{next(self._names)}" for _ in range(open)]
        for name in names:
            self._asked[name] = client, tokens, self.told.seconds
            asked = RequestSubmitted(name, name, PROMPT, LIMIT, client=client, **other)
            self.tell(asked)
        return names

    def train(self, tokens: int, groups: int) -> None:
        """Groups of the trainer, which takes batches as they come."""
        for _ in range(groups):
            group = f"g{next(self._names)}"
            self._asked[f"{group}/0"] = "", tokens, self.told.seconds
            self.tell(GroupSubmitted(group, 1, PROMPT, LIMIT))
        self.tell(BatchRequested())

    def run(self, until: float) -> None:
        """Requests end, and their clients ask again; `until`: seconds."""
        while self._ends and self._ends[0][0] <= until:
            self.told.seconds, attempt, name = heappop(self._ends)
            if self._began.pop(attempt, None) is None:
                continue  # it was interrupted
            client, tokens, _ = self._asked.pop(name)
            self.served[client] += tokens
            made = self.told.request(name).response_tokens
            self.tell(RequestFinished(name, attempt, tokens - made))
            if client:
                self.ask(client, tokens)
            else:
                self.train(tokens, 1)
        self.told.seconds = until
        self.told.scheduler.check_invariants()

    def tell(self, event: Event) -> None:
        for action in self.told.scheduler.handle(event, self.told.seconds):
            if isinstance(action, Dispatch):
                client, tokens, asked = self._asked[action.request]
                tokens -= action.response_tokens
                self.waited.setdefault(client, []).append(self.told.seconds - asked)
                self._began[action.attempt] = action.request, self.told.seconds
                heappush(self._ends, (self.told.seconds + tokens, action.attempt, action.request))
            elif isinstance(action, Interrupt) and self.answers:
                name, began = self._began.pop(action.attempt)
                made = int(self.told.seconds - began)
                self.tell(RequestInterrupted(name, action.attempt, made))

    def running(self, client: str) -> int:
        attempts = self.told.scheduler.state.fleet.attempts.values()
        return sum(attempt.request.client == client for attempt in attempts)


def interrupting(attempt: Attempt) -> bool:
    return attempt.request.state is RequestState.INTERRUPTING


@pytest.mark.parametrize("admission", POLICIES)
def test_a_client_alone_has_all_slots(admission: str) -> None:
    fleet = Fleet(admission=admission)
    fleet.ask("flood", 50, open=40)
    assert fleet.running("flood") == 16


@pytest.mark.parametrize("admission", POLICIES)
def test_a_flood_does_not_hold_up_whoever_asks_for_little(admission: str) -> None:
    fleet = Fleet(admission=admission)
    fleet.ask("flood", 50, open=500, priority=-(10**9))
    fleet.ask("innocent", 1)
    fleet.run(until=500.0)
    assert len(fleet.waited["innocent"]) > 490
    assert max(fleet.waited["innocent"]) == 0.0, "one slot is free for it, from its first request"
    assert fleet.running("flood") == 15


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.tuples(st.integers(1, LIMIT), st.integers(20, 40)), min_size=2, max_size=5),
    st.sampled_from(POLICIES),
)
def test_tokens_are_equal_while_all_wait(clients: list[tuple[int, int]], admission: str) -> None:
    """They differ by less than what one may have in flight, however long the run."""
    fleet = Fleet(8, admission=admission)
    for number, (tokens, open) in enumerate(clients):
        fleet.ask(f"c{number}", tokens, open=open)
    fleet.run(until=100.0)
    before = Counter(fleet.served)
    fleet.run(until=600.0)
    costs = {f"c{n}": tokens + PROMPT for n, (tokens, _) in enumerate(clients)}
    made = {c: (fleet.served[c] - before[c]) * costs[c] / (costs[c] - PROMPT) for c in costs}
    assert max(made.values()) - min(made.values()) <= 2 * 8 * (LIMIT + PROMPT)


@pytest.mark.parametrize("admission", ["slots", "kv_tokens"])
@pytest.mark.parametrize(("floods", "share"), [(1, TRAINER_SHARE), (20, 1 - 1 / ONE_IN)])
def test_the_trainer_keeps_its_part(floods: int, share: float, admission: str) -> None:
    fleet = Fleet(64, admission=admission, **FULLY_ASYNC)
    fleet.train(30, 256)
    for flood in range(floods):
        fleet.ask(f"f{flood}", 30, open=200, priority=-1)
    fleet.run(until=300.0)
    before = fleet.served.copy()
    fleet.run(until=1_000.0)
    made = fleet.served - before
    assert made[""] / made.total() == pytest.approx(share, abs=0.01)


def test_a_client_does_not_wait_for_what_others_owe_the_trainer() -> None:
    fleet = Fleet(32, **FULLY_ASYNC)
    fleet.train(30, 128)
    fleet.ask("flood", LIMIT, open=200)
    fleet.ask("innocent", 1)
    fleet.run(until=500.0)
    fleet.waited["innocent"].clear()
    fleet.run(until=3_000.0)
    assert max(fleet.waited["innocent"]) <= 30.0, "it gets the next slot that is free"


def test_silence_earns_no_credit() -> None:
    fleet = Fleet(4)
    fleet.ask("always", 20, open=20)
    fleet.run(until=500.0)
    fleet.ask("late", 20, open=20)
    before = fleet.served.copy()
    fleet.run(until=1_500.0)
    made = fleet.served - before
    assert made["always"] == pytest.approx(made["late"], rel=0.1)


def test_slots_are_kept_only_while_there_is_somebody_else() -> None:
    fleet = Fleet()
    fleet.ask("flood", 20, open=40)
    (other,) = fleet.ask("other", 5)
    fleet.tell(RequestWithdrawn(other))
    fleet.run(until=BESIDE_S - 1)
    assert fleet.running("flood") == 15
    fleet.run(until=BESIDE_S + 25)
    assert fleet.running("flood") == 16


def test_a_queue_inside_an_instance_is_taken_back() -> None:
    fleet = Fleet(64)
    fleet.answers = False
    flood = fleet.ask("flood", 50, open=100)
    queued = InstanceReported("i0", 32, 32, 1.0)
    assert fleet.told(queued) == [], "a client that is alone may queue where it likes"
    fleet.ask("innocent", 1)
    state = fleet.told.scheduler.state
    taken = [state.fleet.attempts[attempt].request.id for attempt in sorted(state.shares.yielding)]
    assert taken == flood[64 - 32 - 2 : 64], "and a sixteenth of what runs, for room"
    assert fleet.told(queued) == [], "once for each report"


def test_a_flood_is_interrupted_at_once_and_nobody_waits_for_its_answers() -> None:
    fleet = Fleet(256)
    fleet.answers = False
    fleet.ask("flood", LIMIT, open=300)
    fleet.ask("innocent", 1)
    fleet.train(30, 4)
    state = fleet.told.scheduler.state
    asked = [a for a in state.fleet.attempts.values() if interrupting(a)]
    assert len(asked) == 256 - 256 // ONE_IN + 1
    assert {attempt.id for attempt in asked} == state.shares.yielding, "all of them count as gone"
    for attempt in asked[:5]:
        fleet.tell(RequestInterrupted(attempt.request.id, attempt.id, 1))
    assert fleet.waited["innocent"] == [0.0], "it goes with the first that answer"
    assert fleet.running("") == 4


@pytest.mark.parametrize("trains", [False, True])
def test_who_wants_more_takes_a_part_from_a_flood_that_was_there(trains: bool) -> None:
    """More calls at once than the slots that are kept, beside requests that do not end."""
    fleet = Fleet(256)
    if trains:
        fleet.train(10_000, 4)
    fleet.ask("other", 1)
    fleet.ask("flood", LIMIT, open=500)
    slots = 16 if trains else 256
    fleet.ask("innocent", 5, open=slots // 4)
    fleet.run(until=20.0)
    assert max(fleet.waited["innocent"]) == 0.0
    assert fleet.running("flood") >= slots // 2, "it gives nothing that nobody wants"
    fleet.ask("greedy", 5, open=slots)
    fleet.run(until=40.0)
    assert fleet.running("greedy") <= slots // 4 + slots // 16, "and to nobody more than a part"
    assert fleet.running("innocent") > slots // 6


def test_long_requests_leave_room_in_the_kv_caches() -> None:
    fleet = Fleet(64)
    fleet.ask("other", 1)
    fleet.ask("flood", LIMIT, open=200)
    shares = fleet.told.scheduler.state.shares
    assert fleet.running("flood") == 59
    shares.kv_tokens = 32 * (LIMIT + PROMPT)
    fleet.run(until=300.0)
    assert fleet.running("flood") == 30, "and what is left is more than a request"
    assert fleet.waited["other"][-1] == 0.0


def test_more_clients_than_queues_share_one() -> None:
    fleet = Fleet(4)
    for number in range(MOST_CLIENTS + 50):
        fleet.ask(f"c{number}", 1)
    assert fleet.told.scheduler.view.waiting == MOST_CLIENTS + 46
    names = {request.client for request in fleet.told.scheduler.parts.requests}
    assert len(names) == MOST_CLIENTS + 1
    fleet.run(until=400.0)
    sharing = sum(fleet.served[f"c{number}"] for number in range(MOST_CLIENTS, MOST_CLIENTS + 50))
    assert sharing >= fleet.served["c1"] - 2, "together they get as much as one client"
