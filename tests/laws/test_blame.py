"""The law of blame, on whole fleets: a poison request costs only its own client, and a bad instance
only itself.

A small world in virtual time plays instances and clients. Some requests are poison: every instance
fails them at once. Some instances are bad: they fail all requests, or some. All others answer after
a while. For every mix:

* every request ends, and all requests that are not poison are answered;
* poison is tried a bounded number of times, and never puts a good instance to rest;
* an instance that fails everything is put to rest as soon as others have answered its requests.
"""

from __future__ import annotations

import random
from heapq import heappop, heappush
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sched.core.model.actions import Action, Answer, Discard, Dispatch, Wake
from rollout_sched.core.model.events import (
    Event,
    InstanceJoined,
    RequestFailed,
    RequestFinished,
    RequestSubmitted,
    Woke,
)
from tests.core.told import make_scheduler

SLOTS = 8
ANSWER_S = (0.5, 4.0)


class World:
    """Instances i0, i1, ...; `fails[i]` is the share of its answers that fail."""

    def __init__(self, fails: list[float], seed: int, routing: str = "least_requests") -> None:
        self.scheduler = make_scheduler(routing=routing)
        self.fails = {f"i{number}": share for number, share in enumerate(fails)}
        self.rng = random.Random(seed)
        self.now = 0.0
        self.later: list[tuple[float, int, Event]] = []
        self.serial = 0
        self.tries: dict[str, int] = {}
        self.begun: dict[str, float] = {}
        self.answered: dict[str, float] = {}
        self.given_up: set[str] = set()
        self.rested: set[str] = set()
        for name in self.fails:
            self.tell(InstanceJoined(name, SLOTS, 10_000))

    def at(self, seconds: float, event: Event) -> None:
        self.serial += 1
        heappush(self.later, (seconds, self.serial, event))

    def ask(self, name: str, at: float) -> None:
        self.at(at, RequestSubmitted(name, name, 10, 100))

    def run(self) -> None:
        while self.later:
            self.now, _, event = heappop(self.later)
            self.tell(event)
        self.scheduler.check_invariants()
        assert len(self.scheduler.parts.requests) == 0, "a request still waits"

    def tell(self, event: Event) -> None:
        if isinstance(event, RequestSubmitted):
            self.begun[event.request] = self.now
        for action in self.scheduler.handle(event, self.now):
            self.do(action)
        for instance in self.scheduler.state.fleet.instances.values():
            if instance.rests_until > self.now:
                self.rested.add(instance.id)

    def do(self, action: Action) -> None:
        if isinstance(action, Dispatch):
            name, attempt = action.request, action.attempt
            self.tries[name] = self.tries.get(name, 0) + 1
            poison = name.startswith("poison")
            if poison or self.rng.random() < self.fails[action.instance]:
                self.at(self.now + 0.001, RequestFailed(name, attempt, "status 500"))
            else:
                self.at(self.now + self.rng.uniform(*ANSWER_S), RequestFinished(name, attempt, 7))
        elif isinstance(action, Wake):
            self.at(action.at, Woke())
        elif isinstance(action, Answer):
            self.answered[action.sample.request] = self.now
        elif isinstance(action, Discard) and action.ends:
            self.given_up.add(action.request)

    @property
    def max_tries(self) -> int:
        return self.scheduler.parts.outcomes.max_failures

    def waits(self) -> list[float]:
        """How long each innocent request waited for its answer."""
        return [self.answered[name] - self.begun[name] for name in self.answered]


@settings(max_examples=60, deadline=None)
@given(
    instances=st.integers(2, 6),
    poison=st.integers(0, 40),
    seed=st.integers(0, 2**32),
    at_once=st.booleans(),
    routing=st.sampled_from(["least_requests", "round_robin", "power_of_two"]),
)
def test_poison_costs_nobody_but_its_client(
    instances: int, poison: int, seed: int, at_once: bool, routing: str
) -> None:
    world = World([0.0] * instances, seed, routing)
    for number in range(60):
        world.ask(f"innocent{number}", world.rng.uniform(0, 10))
    for number in range(poison):
        world.ask(f"poison{number}", 5.0 if at_once else world.rng.uniform(0, 10))
    world.run()
    assert len(world.answered) == 60
    assert world.given_up == {f"poison{number}" for number in range(poison)}
    assert not world.rested
    assert all(world.tries[f"poison{n}"] == world.max_tries for n in range(poison))
    assert all(world.tries[name] == 1 for name in world.answered)


@pytest.mark.parametrize("seed", range(5))
def test_poison_changes_nobodys_latency_beyond_a_bound(seed: int) -> None:
    """Poison holds a slot until an instance has failed it: here a millisecond."""

    def longest(poison: int) -> float:
        world = World([0.0] * 4, seed)
        for number in range(200):
            world.ask(f"innocent{number}", 0.05 * number)
        for number in range(poison):
            world.ask(f"poison{number}", 0.02 * number)
        world.run()
        return max(world.waits())

    assert longest(500) <= longest(0) + ANSWER_S[1] / 4


@settings(max_examples=40, deadline=None)
@given(instances=st.integers(2, 6), seed=st.integers(0, 2**32), poison=st.integers(0, 20))
def test_an_instance_that_fails_everything_rests_and_nothing_is_lost(
    instances: int, seed: int, poison: int
) -> None:
    world = World([1.0] + [0.0] * (instances - 1), seed)
    for number in range(80):
        world.ask(f"innocent{number}", world.rng.uniform(0, 40))
    for number in range(poison):
        world.ask(f"poison{number}", world.rng.uniform(0, 40))
    world.run()
    assert len(world.answered) == 80
    assert world.rested == {"i0"}


@settings(max_examples=40, deadline=None)
@given(share=st.sampled_from([0.01, 0.05]), seed=st.integers(0, 2**32))
def test_an_instance_that_fails_now_and_then_keeps_nearly_all_of_its_work(
    share: float, seed: int
) -> None:
    world = World([share, 0.0], seed)
    for number in range(300):
        world.ask(f"innocent{number}", 0.2 * number)
    world.run()
    assert len(world.answered) == 300
    tried: dict[str, Any] = world.tries
    assert sum(tried.values()) <= 300 * (1 + 3 * share) + 3
