"""Sets of about equal weight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.core.model.errors import CallerError
from rollout_sched.live.trainer.samples import balanced


@given(st.lists(st.integers(0, 40_000), max_size=60), st.integers(1, 9))
def test_nothing_is_lost_and_no_two_sets_differ_by_more_than_the_heaviest(
    weights: list[int], count: int
) -> None:
    sets = balanced(weights, count)
    assert len(sets) == count
    assert sorted(place for one in sets for place in one) == list(range(len(weights)))
    assert all(one == sorted(one) for one in sets)
    totals = [sum(weights[place] for place in one) for one in sets]
    assert max(totals) - min(totals) <= max(weights, default=0)


@pytest.mark.parametrize(
    ("weights", "count", "totals"),
    [
        ([8, 7, 6, 5, 4], 2, [14, 16]),  # Karmarkar and Karp's own; 15 and 15 would be best
        ([8, 7, 6, 5, 4], 1, [30]),
        ([5, 5, 5, 5], 4, [5, 5, 5, 5]),
        ([3, 9], 3, [0, 3, 9]),
        ([], 2, [0, 0]),
    ],
)
def test_known_divisions(weights: list[int], count: int, totals: list[int]) -> None:
    sets = balanced(weights, count)
    assert sorted(sum(weights[place] for place in one) for one in sets) == totals


def test_a_long_list_is_divided_evenly() -> None:
    weights = [100 + 37 * number % 3001 for number in range(5000)]
    totals = [sum(weights[place] for place in one) for one in balanced(weights, 8)]
    assert max(totals) - min(totals) < 10


def test_no_ranks_are_none() -> None:
    with pytest.raises(CallerError, match="at least one rank, not 0"):
        balanced([1], 0)
