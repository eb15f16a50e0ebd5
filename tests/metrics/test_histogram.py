"""Buckets are inclusive and cumulative, and reach as far as responses do."""

from __future__ import annotations

import math

from rollout_sched.metrics.fold import SECONDS, TOKENS, Histogram


def test_bounds_are_inclusive_and_counts_cumulative() -> None:
    histogram = Histogram((1, 2.5, 4))
    for value in (0, 1, 1.5, 2.5, 4.1):
        histogram.add(value)
    assert histogram.counts == [2, 2, 0, 1]
    assert histogram.cumulative() == [(1, 2), (2.5, 4), (4, 4), (math.inf, 5)]
    assert histogram.sum == 9.1


def test_the_bounds_of_the_field() -> None:
    assert (SECONDS[0], SECONDS[-1], len(SECONDS)) == (0.005, 3600.0, 35)
    assert (TOKENS[:3], TOKENS[-1]) == ((1, 8, 16), 2**20)
    for bounds in (SECONDS, TOKENS):
        assert list(bounds) == sorted(set(bounds))
