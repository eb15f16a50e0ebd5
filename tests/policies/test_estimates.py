"""What is known of a running instance, and what follows from it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.core.model.records import DeliveredGroup
from rollout_sched.core.model.roles import Capacity
from rollout_sched.policies.estimates import (
    WEIGHTS_TOKENS,
    LoadEstimate,
    RoundCost,
    best_over_prompts,
)
from tests.policies.running import Running

KV = 10**6  # tokens of each instance


def test_streamed_tokens_are_counted_exactly() -> None:
    fleet = Running(1)
    one, two = fleet.run(0, 500, 900)
    fleet.poll(0, 0.5)
    load = LoadEstimate(fleet[0])
    assert (load.context(one), load.context(two)) == (600, 1000)


def test_polled_tokens_are_an_average() -> None:
    fleet = Running(1)
    one, _ = fleet.run(0, 0, 0)
    assert LoadEstimate(fleet[0]).tokens == 200
    fleet.poll(0, 6000 / KV)
    load = LoadEstimate(fleet[0])
    assert (load.tokens, load.context(one)) == (6000, 3000)


def test_queued_requests_are_expected_to_need_the_average() -> None:
    fleet = Running(1)
    fleet.run(0, 0, 0, 0)
    fleet.poll(0, 6000 / KV, running=2, waiting=1)
    assert LoadEstimate(fleet[0]).tokens == 9000


def test_an_idle_instance_that_was_polled_before_it_got_work() -> None:
    fleet = Running(1)
    fleet.poll(0, 0.0)
    fleet.run(0, 0)
    assert LoadEstimate(fleet[0]).tokens == 100


class TestTokensLeft:
    def left(self, made: int, estimate: int | None = None, most: int = 50_000) -> float:
        fleet = Running(1)
        (attempt,) = fleet.run(0, made)
        attempt.request.siblings.estimate = estimate
        attempt.request.siblings.max_tokens = most
        return LoadEstimate(fleet[0]).tokens_left(attempt)

    def test_remaining_tokens_equal_the_generated_ones(self) -> None:
        assert self.left(700) == 700

    def test_as_siblings_say(self) -> None:
        assert self.left(700, 1000) == 300

    def test_remaining_tokens_double_once_siblings_were_exceeded(self) -> None:
        assert self.left(1200, 1000) == 1200

    def test_remaining_tokens_never_exceed_the_limit(self) -> None:
        assert self.left(700, most=1000) == 300


def test_room_is_kv_and_a_slot() -> None:
    fleet = Running(1, slots=3)
    fleet.run(0, 7900)
    fleet[0].kv_tokens = 10_000
    load = LoadEstimate(fleet[0])
    assert load.has_room(1000, 0.9)
    assert not load.has_room(1001, 0.9)
    load.add(100)
    load.add(100)
    assert not load.has_room(100, 1.0)
    load.take(100)
    assert load.has_room(100, 1.0)
    assert (load.requests, load.tokens) == (2, 8100)


# ------------------------------------------------------------------------------------------
# How long rounds take, and what over-provisioning saves of it.


LARGE = Capacity(instances=8, slots=10_000, kv_tokens=10**9)

#: Three prompts of four are short.
TAIL = [DeliveredGroup(100, (length, length)) for length in (1000, 1000, 1000, 20_000)] * 8
ALIKE = [DeliveredGroup(100, (5000, 5000))] * 32


def test_a_round_that_fits_costs_its_longest_answer_and_context_reads() -> None:
    cost = RoundCost([DeliveredGroup(100, (400, 400))] * 3, 10, LARGE)
    tokens, context = 10 * 2 * 400, 100 + 400 / 2
    assert cost.steps_per_batch(1.0) == pytest.approx(400 + tokens * context / (8 * WEIGHTS_TOKENS))


def test_queueing_adds_to_the_cost() -> None:
    few = Capacity(instances=8, slots=5, kv_tokens=10**9)
    groups = [DeliveredGroup(100, (400, 400))] * 3
    waiting = RoundCost(groups, 10, few).steps_per_batch(1.0) - RoundCost(
        groups, 10, LARGE
    ).steps_per_batch(1.0)
    assert waiting == pytest.approx((1 - 5 / 20) * 20 * 400 / 5)


def test_kv_bounds_the_slots() -> None:
    kv = Capacity(instances=8, slots=10_000, kv_tokens=5 * 300)
    slots = Capacity(instances=8, slots=5, kv_tokens=10**9)
    groups = [DeliveredGroup(100, (400, 400))] * 3
    assert RoundCost(groups, 10, kv).steps_per_batch(1.0) == pytest.approx(
        RoundCost(groups, 10, slots).steps_per_batch(1.0)
    )


def test_a_tail_of_few_prompts_is_worth_rounds_of_its_own() -> None:
    cost = RoundCost(TAIL, 16, Capacity(instances=1000, slots=10_000, kv_tokens=10**9))
    # Of four rounds three take 1,000 tokens and one takes 20,000, and not all four.
    assert cost.steps_per_batch(4 / 3) == pytest.approx((3 * 1000 + 20_000) / 4, rel=0.02)
    assert cost.steps_per_batch(1.0) == pytest.approx(20_000, rel=0.02)
    assert best_over_prompts(cost, 1.5, 0.1) > 1.25


@pytest.mark.parametrize(
    ("groups", "capacity"),
    [
        (ALIKE, LARGE),  # no tail
        (TAIL, Capacity(instances=1, slots=1, kv_tokens=10**9)),  # no room
    ],
)
def test_no_over_provisioning_without_savings(groups: Any, capacity: Any) -> None:
    assert best_over_prompts(RoundCost(groups, 16, capacity), 1.5, 0.1) == 1.0


def test_candidates_are_eighths_and_the_most() -> None:
    seen: list[float] = []

    class Seen:
        def steps_per_batch(self, over_prompts: float) -> float:
            seen.append(over_prompts)
            return 1.0

    best_over_prompts(Seen(), 1.3, 0.0)  # type: ignore[arg-type]
    assert sorted(set(seen)) == [1.0, 1.125, 1.25, 1.3]


@given(
    st.lists(st.lists(st.integers(1, 40_000), min_size=1, max_size=4), min_size=1, max_size=40),
    st.integers(1, 64),
)
def test_more_room_never_makes_a_batch_longer(lengths: list[list[int]], prompts: int) -> None:
    groups = [DeliveredGroup(100, tuple(group)) for group in lengths]
    costs = [
        RoundCost(groups, prompts, Capacity(8, slots, slots * 1000)).steps_per_batch(1.25)
        for slots in (1, 16, 256, 4096)
    ]
    assert all(less <= more * (1 + 1e-9) for more, less in pairwise(costs))
    assert costs[-1] > 0
