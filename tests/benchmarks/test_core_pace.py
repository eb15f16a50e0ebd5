"""How fast a core is while others use it, what of that is felt, and what constants are worth."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from benchmarks import core_pace
from benchmarks.core_pace import CorePaces, PacedTime, PaceSample, factor, felt, sampled, scaled
from rollout_sched.simulators.instance.step_time import StepTime
from tests.calibration.virtual import COST

FAST = [PaceSample(float(at), 0.001) for at in range(60)]
SLOW = [PaceSample(float(at), 0.0017) for at in range(60, 100)]


def test_samples_are_taken_while_others_run(tmp_path: Path) -> None:
    path = tmp_path / "paces"
    began = time.monotonic()
    with sampled(min(os.sched_getaffinity(0)), path):
        assert core_pace.read(path)
        while len(core_pace.read(path)) < 3:
            time.sleep(0.01)
    found = core_pace.read(path)
    assert all(sample.seconds > 0 for sample in found)
    assert began < found[0].at < found[-1].at < time.monotonic()


def test_a_sampler_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with"), sampled(10_000, tmp_path / "paces"):
        pass


def test_a_line_that_is_not_whole_is_none(tmp_path: Path) -> None:
    path = tmp_path / "paces"
    path.write_text("1.0 0.5\n2.0 0.")
    assert core_pace.read(path) == [PaceSample(1.0, 0.5)]


def test_one_is_as_fast_as_it_gets() -> None:
    paces = CorePaces(FAST + SLOW)
    assert paces.between(3, 9) == pytest.approx(1.0)
    assert paces.between(70, 70.01) == pytest.approx(1.7)
    assert paces.between(50, 69) == pytest.approx(1.35)
    assert paces.between(99.4, 99.5) == paces.between(200, 201) == pytest.approx(1.7)


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_the_felt_share_is_found_again(share: float) -> None:
    rng = random.Random(0)
    times = {
        name: [
            PacedTime(usual * factor(slow, share) * rng.lognormvariate(0, 0.02), slow)
            for slow in (1.0, 1.2, 1.4, 1.7, 1.0, 1.6)
        ]
        for name, usual in enumerate((0.01, 0.3, 2.0, 0.05, 0.7))
    }
    assert felt(times) == pytest.approx(share, abs=0.1)


def test_everything_takes_as_many_times_as_long() -> None:
    slow, usual = StepTime(scaled(COST, 1.5)), StepTime(COST)
    for step in ((7, 7, 7000, 0.0, 0), (3, 200, 900, 2e4, 2)):
        assert slow.step(*step) == pytest.approx(1.5 * usual.step(*step))
    assert scaled(COST, 1.5).exponent == COST.exponent
