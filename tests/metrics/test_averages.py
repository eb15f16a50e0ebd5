"""Averages of nothing are 0; quantiles are values that are there."""

from __future__ import annotations

import pytest

from rollout_sched.metrics.fold import mean, quantile, share


def test_of_nothing_they_are_zero() -> None:
    assert share(1.0, 0.0) == mean([]) == quantile([], 0.5) == 0.0


@pytest.mark.parametrize(("q", "value"), [(0.5, 2.0), (0.9, 4.0), (0.99, 4.0), (0.25, 1.0)])
def test_a_quantile_is_the_smallest_value_that_enough_do_not_exceed(q: float, value: float) -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], q) == value
