"""What answers take beside the engine, from how much later the last was there than the first."""

from __future__ import annotations

import pytest

from rollout_sched.calibration.bursts import SHORT, Burst, BurstTime, writing_s


def spread(gap_s: float) -> list[BurstTime]:
    return [BurstTime(1.0, 1.0 + gap_s)]


def test_it_is_how_much_more_the_last_is_late_the_longer_answers_are() -> None:
    """Short ones are written while the last of the requests, which came one after the other, are
    still under way."""
    times = {
        Burst(batch, SHORT, new): spread((batch - 1) * max(2e-3, 1e-3 + 4e-5 * new))
        for batch in (1, 4, 16)
        for new in (1, 16, 64, 128)
    }
    assert writing_s(times) == pytest.approx(4e-5)


def test_bursts_that_end_in_several_steps_say_nothing() -> None:
    several = {Burst(4, SHORT, 16, waves=3): spread(9.0), Burst(4, 900, 16): spread(0.5)}
    assert writing_s(several) == 0.0


def test_no_less_than_nothing() -> None:
    times = {Burst(4, SHORT, 1): spread(0.1), Burst(4, SHORT, 128): spread(0.05)}
    assert writing_s(times) == 0.0


def test_one_length_or_one_request_at_once_says_nothing() -> None:
    assert writing_s({Burst(4, SHORT, 16): spread(0.1)}) == 0.0
    assert writing_s({Burst(1, SHORT, new): spread(0.0) for new in (1, 16)}) == 0.0
    assert writing_s({}) == 0.0
