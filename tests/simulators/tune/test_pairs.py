"""Comparison in pairs: what seeds have in common falls out, and noise wins nothing."""

from __future__ import annotations

import math

import pytest

from rollout_sched.simulators.tune.evaluation import (
    CaseFigures,
    SpeedUp,
    simplest_of_the_best,
    speed_up,
)


def at(*speeds: float) -> list[CaseFigures]:
    return [CaseFigures(tokens_per_s=speed) for speed in speeds]


def test_seeds_fall_out() -> None:
    ratio = speed_up(at(11, 110, 1100), at(10, 100, 1000))
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((1.1, 1.1, 1.1))


def test_the_interval_is_students() -> None:
    ratio = speed_up(at(math.exp(0.1), math.exp(0.3)), at(1, 1))
    assert ratio.mean == pytest.approx(math.exp(0.2))
    half = 6.31 * math.sqrt(0.02 / 2)
    assert ratio.low == pytest.approx(math.exp(0.2 - half))
    assert ratio.high == pytest.approx(math.exp(0.2 + half))


def test_many_seeds_have_an_interval_too() -> None:
    ratio = speed_up(at(*[1.1, 1.2] * 10), at(*[1.0] * 20))
    assert 1.1 < ratio.low < ratio.mean < ratio.high < 1.2


def test_one_case_leaves_something_open() -> None:
    ratio = speed_up(at(1.04), at(1.0))
    assert ratio.low < 1.0 < ratio.high


def test_it_is_said_shortly() -> None:
    assert str(SpeedUp(1.256, 1.2, 1.3)) == "1.26x [1.20, 1.30]"


class TestChoice:
    def choose(self, speeds: dict[str, list[float]], departures: dict[str, int]) -> str:
        return simplest_of_the_best(
            list(speeds),
            lambda one, other: speed_up(at(*speeds[one]), at(*speeds[other])),
            lambda one: departures[one],
        )

    def test_the_faster_wins_by_more_than_the_spread(self) -> None:
        speeds = {"plain": [1.0, 1.0, 1.0], "odd": [1.2, 1.21, 1.22]}
        assert self.choose(speeds, {"plain": 0, "odd": 5}) == "odd"

    def test_within_the_spread_the_simpler(self) -> None:
        speeds = {"odd": [1.05, 0.98, 1.02], "plain": [1.0, 1.0, 1.0]}
        assert self.choose(speeds, {"plain": 0, "odd": 5}) == "plain"

    def test_a_wide_spread_does_not_excuse_a_slow_one(self) -> None:
        speeds = {"odd": [1.5, 1.0, 1.1], "plain": [1.0, 1.0, 1.0]}
        assert self.choose(speeds, {"plain": 0, "odd": 5}) == "odd"

    def test_of_equally_simple_ones_the_faster(self) -> None:
        speeds = {"one": [1.0, 1.01], "other": [1.01, 1.005]}
        assert self.choose(speeds, {"one": 1, "other": 1}) == "other"
