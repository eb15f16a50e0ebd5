"""Times of bursts: medians, their spread, and the constants behind them."""

from __future__ import annotations

import pytest

from rollout_sched.calibration.bursts import Burst, BurstTime
from rollout_sched.calibration.calibration import Measurements, spread


def test_a_neighbour_who_disturbs_once_changes_nothing() -> None:
    measurements = Measurements()
    for seconds in (1.0, 1.02, 9.0):
        measurements.add(Burst(1, 32, 8), [BurstTime(seconds, seconds)])
    assert measurements.medians == {Burst(1, 32, 8): 1.02}


def test_what_was_never_measured_is_not_there() -> None:
    measurements = Measurements()
    measurements.add(Burst(1, 32, 8), [])
    assert measurements.whole == {}
    assert measurements.spread is None


def test_the_spread_is_half_the_quartiles_distance() -> None:
    assert spread([[0.9, 1.0, 1.1], [1.0, 1.0, 1.0], [0.8, 1.0, 1.2]]) == pytest.approx(0.05)
    assert spread([[1.0, 2.0]]) is None


def test_steps_of_a_constant_time() -> None:
    measurements = Measurements()
    for batch in (1, 4):
        for new in (1, 9):
            time = BurstTime(0.01 * new, 0.01 * new)
            measurements.add(Burst(batch, 32, new), [time])
    fit = measurements.fit(8, 2048)
    assert fit.max_error < 1e-6
    assert fit.cost.step_s + fit.cost.weights_s == pytest.approx(0.01)
