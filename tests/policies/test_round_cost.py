"""How long rounds take, and what over-provisioning saves of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.core.model.records import DeliveredGroup
from rollout_sched.core.model.roles import Capacity
from rollout_sched.policies.load_estimate import WEIGHTS_TOKENS
from rollout_sched.policies.round_cost import RoundCost, best_over_prompts

LARGE = Capacity(instances=8, slots=10_000, kv_tokens=10**9)

#: Three prompts of four are short.
TAIL = [DeliveredGroup(100, (length, length)) for length in (1000, 1000, 1000, 20_000)] * 8
ALIKE = [DeliveredGroup(100, (5000, 5000))] * 32


def test_a_round_that_all_fits_takes_its_longest_and_the_reading_of_contexts() -> None:
    cost = RoundCost([DeliveredGroup(100, (400, 400))] * 3, 10, LARGE)
    tokens, context = 10 * 2 * 400, 100 + 400 / 2
    assert cost.of(1.0) == pytest.approx(400 + tokens * context / (8 * WEIGHTS_TOKENS))


def test_who_waits_for_a_place_comes_on_top() -> None:
    few = Capacity(instances=8, slots=5, kv_tokens=10**9)
    groups = [DeliveredGroup(100, (400, 400))] * 3
    waiting = RoundCost(groups, 10, few).of(1.0) - RoundCost(groups, 10, LARGE).of(1.0)
    assert waiting == pytest.approx((1 - 5 / 20) * 20 * 400 / 5)


def test_kv_bounds_the_places_too() -> None:
    kv = Capacity(instances=8, slots=10_000, kv_tokens=5 * 300)
    slots = Capacity(instances=8, slots=5, kv_tokens=10**9)
    groups = [DeliveredGroup(100, (400, 400))] * 3
    assert RoundCost(groups, 10, kv).of(1.0) == pytest.approx(RoundCost(groups, 10, slots).of(1.0))


def test_a_tail_of_few_prompts_is_worth_rounds_of_its_own() -> None:
    cost = RoundCost(TAIL, 16, Capacity(instances=1000, slots=10_000, kv_tokens=10**9))
    # Of four rounds three take 1,000 tokens and one takes 20,000, and not all four.
    assert cost.of(4 / 3) == pytest.approx((3 * 1000 + 20_000) / 4, rel=0.02)
    assert cost.of(1.0) == pytest.approx(20_000, rel=0.02)
    assert best_over_prompts(cost, 1.5, 0.1) > 1.25


@pytest.mark.parametrize(
    ("groups", "capacity"),
    [
        (ALIKE, LARGE),  # no tail
        (TAIL, Capacity(instances=1, slots=1, kv_tokens=10**9)),  # no room
    ],
)
def test_where_nothing_is_saved_nothing_is_over_provisioned(groups: Any, capacity: Any) -> None:
    assert best_over_prompts(RoundCost(groups, 16, capacity), 1.5, 0.1) == 1.0


def test_candidates_are_eighths_and_the_most() -> None:
    seen: list[float] = []

    class Seen:
        def of(self, over_prompts: float) -> float:
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
        RoundCost(groups, prompts, Capacity(8, slots, slots * 1000)).of(1.25)
        for slots in (1, 16, 256, 4096)
    ]
    assert all(less <= more * (1 + 1e-9) for more, less in pairwise(costs))
    assert costs[-1] > 0
