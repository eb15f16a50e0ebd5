"""Routing: where each policy sends a request, on a real fleet with hand-made loads."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rollout_sched.core.model.events import InstanceReported
from rollout_sched.core.model.model import PromptLengths, Request
from rollout_sched.policies import routing
from tests.helpers import Loads, make_request


class NotedDice:
    """Dice that remember what they were asked and answer as told."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)

    def randrange(self, stop: int, /) -> int:
        answer = self.answers.pop(0)
        assert 0 <= answer < stop
        return answer


def chosen(policy: Any, loads: Loads, **request: Any) -> str | None:
    instance = policy.choose(make_request(**request), loads.fleet)
    return None if instance is None else instance.id


ALL: list[Callable[[], Any]] = [
    routing.RoundRobin,
    lambda: routing.Random(random.Random(0)),
    lambda: routing.PowerOfTwo(random.Random(0)),
    routing.LeastRequests,
    routing.LeastTokens,
    routing.VllmInternalLb,
    routing.GroupTokens,
    routing.SessionAffinity,
    routing.LengthSplit,
    routing.StaticSplit,
]


@pytest.mark.parametrize("make", ALL)
def test_a_closed_fleet_gets_nothing(make: Callable[[], Any]) -> None:
    policy = make()
    assert chosen(policy, Loads(policy, 0), last_instance="i0") is None
    full = Loads(policy, 2, slots=1)
    full.send(0)
    full.send(1)
    assert chosen(policy, full, last_instance="i0") is None


@pytest.mark.parametrize("make", ALL)
def test_the_only_open_instance_gets_all(make: Callable[[], Any]) -> None:
    policy = make()
    loads = Loads(policy, 3, slots=1)
    loads.send(0)
    loads.send(2)
    assert chosen(policy, loads) == "i1"


def test_round_robin_is_fair_whatever_the_load() -> None:
    policy = routing.RoundRobin()
    loads = Loads(policy, 3)
    order = []
    for turn in range(9):
        order.append(chosen(policy, loads))
        loads.send(turn % 3, context=1000 if turn % 3 else 1)
    assert order == ["i0", "i1", "i2"] * 3


def test_round_robin_skips_a_full_instance_and_returns_to_it() -> None:
    policy = routing.RoundRobin()
    loads = Loads(policy, 2, slots=1)
    loads.send(0)
    assert chosen(policy, loads) == "i1"
    loads.fleet.close(next(iter(loads[0].attempts.values())))
    loads.send(1)
    assert chosen(policy, loads) == "i0"


def test_random_reaches_every_instance_evenly() -> None:
    policy = routing.Random(random.Random(1))
    loads = Loads(policy, 4)
    counts = Counter(chosen(policy, loads) for _ in range(4000))
    assert len(counts) == 4
    assert all(900 < count < 1100 for count in counts.values())


def test_power_of_two_draws_two_different_ones() -> None:
    # Every pair of answers the dice can give, on three instances loaded 2, 1, 0.
    seen = set()
    for first in range(3):
        for second in range(2):
            policy = routing.PowerOfTwo(NotedDice(first, second))
            loads = Loads(policy, 3)
            loads.send(0, 2)
            loads.send(1, 1)
            seen.add((first, second, chosen(policy, loads)))
    # The fullest is never the choice, for it is never compared with itself.
    assert {choice for _, _, choice in seen} == {"i1", "i2"}
    assert sum(choice == "i2" for _, _, choice in seen) == 4  # of six ordered pairs


def test_power_of_two_breaks_a_tie_by_joining() -> None:
    policy = routing.PowerOfTwo(NotedDice(2, 0))
    assert chosen(policy, Loads(policy, 3)) == "i0"


def test_power_of_two_is_reproducible_by_seed() -> None:
    def choices(seed: int) -> list[str | None]:
        policy = routing.PowerOfTwo(random.Random(seed))
        loads = Loads(policy, 8)
        return [chosen(policy, loads) for _ in range(30)]

    assert choices(3) == choices(3)
    assert choices(3) != choices(4)


def test_least_tokens_and_least_requests_differ() -> None:
    def answer(policy: Any) -> str | None:
        loads = Loads(policy, 2)
        loads.send(0, 1, context=5000)
        loads.send(1, 3, context=10)
        return chosen(policy, loads)

    assert answer(routing.LeastRequests()) == "i0"
    assert answer(routing.LeastTokens()) == "i1"


def test_least_tokens_counts_expected_tokens() -> None:
    policy = routing.LeastTokens()
    loads = Loads(policy, 2)
    long = make_request(context=10)
    long.expected_tokens = 800
    loads.fleet.send(long, loads[0], 1000)
    loads.send(1, context=500)
    assert chosen(policy, loads) == "i1"


class TestVllmInternalLb:
    def test_queued_requests_weigh_four_times(self) -> None:
        loads = Loads(routing.VllmInternalLb(), 2)
        loads.fleet.report(loads[0], InstanceReported("i0", 0, 3, 0.0))
        loads.fleet.report(loads[1], InstanceReported("i1", 11, 0, 0.9))
        assert chosen(routing.VllmInternalLb(), loads) == "i1"
        loads.fleet.report(loads[1], InstanceReported("i1", 13, 0, 0.9))
        assert chosen(routing.VllmInternalLb(), loads) == "i0"

    def test_counts_dispatches_but_not_answers_since_the_report(self) -> None:
        loads = Loads(routing.VllmInternalLb(), 2)
        loads.fleet.report(loads[1], InstanceReported("i1", 5, 0, 0.0))
        loads.send(0)
        assert chosen(routing.VllmInternalLb(), loads) == "i0"
        loads.send(0)
        assert chosen(routing.VllmInternalLb(), loads) == "i1"
        for attempt in list(loads[0].attempts.values()):
            loads.fleet.close(attempt)
        assert chosen(routing.VllmInternalLb(), loads) == "i1"
        loads.fleet.report(loads[0], InstanceReported("i0", 0, 0, 0.0))
        assert chosen(routing.VllmInternalLb(), loads) == "i0"


def second_sample(loads: Loads, prompt: int) -> Request:
    """Of a prompt of which the first runs on i0."""
    first = make_request(context=prompt)
    second = Request("g/1", first.siblings, first.group, 1, 1, prompt)
    first.siblings.requests += [first, second]
    first.attempt = loads.fleet.send(first, loads[0], 1000)
    first.last_instance = "i0"
    return second


class TestGroupTokens:
    policy = routing.GroupTokens(shared_tokens=100, margin=2.0)

    def choose(self, loads: Loads, request: Request) -> str | None:
        instance = self.policy.choose(request, loads.fleet)
        return None if instance is None else instance.id

    def test_samples_of_a_long_prompt_are_together(self) -> None:
        loads = Loads(self.policy, 2)
        assert self.choose(loads, second_sample(loads, 100)) == "i0"

    def test_samples_of_a_short_prompt_go_to_the_fewest_tokens(self) -> None:
        loads = Loads(self.policy, 2)
        assert self.choose(loads, second_sample(loads, 99)) == "i1"

    def test_samples_part_when_tokens_are_too_uneven(self) -> None:
        loads = Loads(self.policy, 2)
        second = second_sample(loads, 100)
        loads.send(0, context=100)
        assert self.choose(loads, second) == "i0"
        loads.send(0, context=1)
        assert self.choose(loads, second) == "i1"

    def test_samples_part_when_their_instance_is_full(self) -> None:
        loads = Loads(self.policy, 2, slots=1)
        assert self.choose(loads, second_sample(loads, 100)) == "i1"


class TestSessionAffinity:
    def test_newcomers_go_where_the_fewest_sessions_are(self) -> None:
        policy = routing.SessionAffinity()
        loads = Loads(policy, 2)
        siblings = make_request().siblings
        for index in range(2):
            loads.fleet.retain_kv(Request(f"g/{index}", siblings, None, index, index, 1), loads[0])
        loads.send(1)
        assert chosen(policy, loads) == "i1", "one in flight, but two will be back to i0"

    @pytest.mark.parametrize(
        ("prompt", "others", "where"), [(100, 0, "i0"), (99, 0, "i1"), (100, 1, "i1")]
    )
    def test_samples_of_a_long_prompt_are_together_until_a_group_is_ahead(
        self, prompt: int, others: int, where: str
    ) -> None:
        policy = routing.SessionAffinity(shared_tokens=100)
        loads = Loads(policy, 2)
        second = second_sample(loads, prompt)
        loads.send(0, others)
        instance = policy.choose(second, loads.fleet)
        assert instance.id == where

    def test_samples_part_where_that_instance_is_full(self) -> None:
        policy = routing.SessionAffinity(shared_tokens=100)
        loads = Loads(policy, 2, slots=1)
        assert policy.choose(second_sample(loads, 100), loads.fleet) is loads[1]

    def test_without_a_home_the_emptiest_is_chosen(self) -> None:
        policy = routing.SessionAffinity()
        loads = Loads(policy, 2)
        loads.send(0)
        assert chosen(policy, loads) == "i1"

    @pytest.mark.parametrize(("ahead", "where"), [(0, "i0"), (2, "i0"), (3, "i1")])
    def test_stays_home_within_the_margin(self, ahead: int, where: str) -> None:
        policy = routing.SessionAffinity(margin=2)
        loads = Loads(policy, 2)
        loads.send(0, ahead)
        assert chosen(policy, loads, last_instance="i0", context=1) == where

    @pytest.mark.parametrize(
        # Three ahead save 3 * 0.125 s of waiting; at 1000 tokens/s that is worth 375 tokens.
        ("context", "where"),
        [(374, "i1"), (375, "i0"), (376, "i0")],
    )
    def test_leaves_only_if_the_wait_saved_exceeds_the_prefill(
        self, context: int, where: str
    ) -> None:
        policy = routing.SessionAffinity(margin=0, prefill_tokens_per_s=1000.0, wait_s=0.125)
        loads = Loads(policy, 2)
        loads.send(0, 3)
        assert chosen(policy, loads, last_instance="i0", context=context) == where

    def test_leaves_a_home_that_is_full(self) -> None:
        policy = routing.SessionAffinity(margin=100)
        loads = Loads(policy, 2, slots=2)
        loads.send(0, 2)
        assert chosen(policy, loads, last_instance="i0", context=10**6) == "i1"

    def test_leaves_a_home_that_is_gone(self) -> None:
        policy = routing.SessionAffinity()
        assert chosen(policy, Loads(policy, 2), last_instance="lost") == "i0"


class TestLengthSplit:
    """StreamRL: the first of every two instances is kept for the long."""

    policy = routing.LengthSplit(long=0.5, every=2, weight=3.0)

    def ask(self, loads: Loads, expected: int, *, estimate: int | None = 1) -> str | None:
        request = make_request()
        request.expected_tokens = expected
        request.siblings.estimate = estimate
        instance = self.policy.choose(request, loads.fleet)
        return None if instance is None else instance.id

    def test_long_requests_go_to_the_emptiest_long_instance(self) -> None:
        loads = Loads(self.policy, 4)
        loads.send(0, 5)
        assert self.ask(loads, 500) == "i2"
        loads.send(2, 6)
        assert self.ask(loads, 500) == "i0"

    def test_short_requests_use_a_much_emptier_long_instance(self) -> None:
        loads = Loads(self.policy, 2)
        loads.send(0, 1)
        loads.send(1, 2)
        assert self.ask(loads, 499) == "i1"
        loads.send(1, 2)
        assert self.ask(loads, 499) == "i0"

    def test_unknown_length_counts_as_short(self) -> None:
        loads = Loads(self.policy, 2)
        loads.send(0, 1)
        assert self.ask(loads, 1000, estimate=None) == "i1"

    def test_prompt_history_decides_the_length(self) -> None:
        loads = Loads(self.policy, 2)
        loads.send(0, 1)
        request = make_request()
        request.expected_tokens = 1000
        for before in (None, PromptLengths()):
            request.siblings.history = before
            assert self.policy.choose(request, loads.fleet) is loads[1]
        request.siblings.history = PromptLengths([1000])
        assert self.policy.choose(request, loads.fleet) is loads[0]
        request.siblings.history, request.siblings.expected_tokens = None, 1000
        assert self.policy.choose(request, loads.fleet) is loads[0]

    def test_long_requests_overflow_when_their_instances_are_full(self) -> None:
        loads = Loads(self.policy, 2, slots=1)
        loads.send(0)
        assert self.ask(loads, 1000) == "i1"


class TestStaticSplit:
    policy = routing.StaticSplit()

    def split(self, prompts: int, instances: int) -> list[int]:
        """How many of the prompts launched together each instance gets."""
        loads = Loads(self.policy, instances)
        counts = Counter(self.place(loads, place, prompts) for place in range(prompts))
        return [counts[f"i{number}"] for number in range(instances)]

    def place(self, loads: Loads, place: int, size: int) -> str | None:
        request = make_request()
        request.group.launch_place, request.group.launch_size = place, size
        instance = self.policy.choose(request, loads.fleet)
        return None if instance is None else instance.id

    @pytest.mark.parametrize(
        ("prompts", "instances", "shares"),
        [(8, 4, [2, 2, 2, 2]), (3, 2, [2, 1]), (2, 4, [1, 0, 1, 0]), (10, 4, [3, 2, 3, 2])],
    )
    def test_shares_are_as_equal_as_can_be(
        self, prompts: int, instances: int, shares: list[int]
    ) -> None:
        assert self.split(prompts, instances) == shares

    def test_shares_are_contiguous_under_any_load(self) -> None:
        loads = Loads(self.policy, 3)
        loads.send(0, 50)
        assert [self.place(loads, place, 6) for place in range(6)] == [
            *("i0", "i0", "i1", "i1", "i2", "i2")
        ]

    def test_share_of_a_closed_instance_goes_to_the_least_busy(self) -> None:
        loads = Loads(self.policy, 3, slots=2)
        loads.send(0, 2)
        loads.send(1)
        assert self.place(loads, 0, 3) == "i2"

    def test_a_client_goes_to_the_least_busy(self) -> None:
        loads = Loads(self.policy, 2)
        loads.send(0)
        request = make_request()
        request.group = None
        instance = self.policy.choose(request, loads.fleet)
        assert instance is loads[1]
