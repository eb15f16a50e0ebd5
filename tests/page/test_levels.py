"""Levels over time in a bounded number of buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.page.run_page import FINEST_S, MAX_BUCKETS, LevelSeries

CHANGES = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 100)), max_size=40)


@given(CHANGES, st.floats(0, 50))
def test_no_area_is_lost(changes: list[tuple[float, float]], rest_s: float) -> None:
    series, now, level, area, peak = LevelSeries(), 0.0, 0.0, 0.0, 0.0
    for passed, to in changes:
        area += passed * level
        now, level = now + passed, to
        series.set(now, to)
        peak = max(peak, to)
    area, end_s = area + rest_s * level, now + rest_s
    means = series.means(end_s)
    lengths = [series.width_s] * len(means)
    if lengths:
        lengths[-1] = end_s - series.width_s * (len(means) - 1)
    got = sum(mean * length for mean, length in zip(means, lengths, strict=True))
    assert got == pytest.approx(area, abs=1e-6 * max(1.0, area))
    assert len(means) <= MAX_BUCKETS
    assert all(mean <= peak * (1 + 1e-9) for mean in means)


def test_buckets_grow_with_time() -> None:
    series = LevelSeries()
    series.set(0.0, 4.0)
    assert series.means(1.0) == [4.0] * 8
    assert series.width_s == FINEST_S
    series.set(FINEST_S * MAX_BUCKETS * 3, 0.0)
    assert series.width_s == 4 * FINEST_S
    assert set(series.means(FINEST_S * MAX_BUCKETS * 3)) == {4.0}


def test_a_peak_is_not_averaged_away() -> None:
    series = LevelSeries()
    series.set(0.01, 9.0)
    series.set(0.02, 1.0)
    assert series.peaks(0.1) == [9.0]
    assert series.means(0.1)[0] < 2.0
