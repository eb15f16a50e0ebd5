"""What was measured is read again as it was."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks import prediction_record
from benchmarks.core_pace import PaceSample
from benchmarks.prediction_record import Arm, Record, TimedMeasurements, journal_of
from rollout_sched.calibration.bursts import Burst, BurstTime
from rollout_sched.core.errors import CallerError
from tests.calibration.test_command import FOUND

BURST, BATCH = Burst(4, 32, 8), Burst(8, 32, 8)
#: A core that is fast for 100 s and then takes 1.5 times as long, of which bursts feel a half.
SAMPLES = [PaceSample(float(at), 0.001 if at < 100 else 0.0015) for at in range(200)]
TIMES = [BurstTime(1.0, 2.0), BurstTime(1.25, 2.5), BurstTime(1.0, 2.0), BurstTime(1.25, 2.5)]
OVER = [20.0, 120.0, 30.0, 130.0]


def record(arm: Arm) -> Record:
    bursts = [(BURST, TIMES, OVER), (BATCH, TIMES, OVER)]
    return Record(FOUND, bursts, SAMPLES, [arm])


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = record(Arm(journal_of("short", "areal", 0), "short", "areal", 3, 10.0, 20.0))
    written.write(tmp_path)
    assert prediction_record.read(tmp_path) == written


def test_a_slow_core_is_taken_out_of_measurements_as_far_as_they_feel_it() -> None:
    found = record(Arm("", "short", "areal", 0, 10.0, 20.0))
    assert found.share == pytest.approx(0.5)
    assert found.measurements.seconds[BURST] == pytest.approx([2.0] * 4)
    assert found.measurements.spread == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("began", "slowness"), [(10.0, 1.0), (150.0, 1.25)])
def test_a_run_is_as_slow_as_the_core_was_meanwhile(began: float, slowness: float) -> None:
    arm = Arm("", "short", "areal", 0, began, began + 10)
    assert record(arm).slowness(arm) == pytest.approx(slowness)


def test_measurements_are_remembered_with_their_time() -> None:
    found = TimedMeasurements()
    before = time.monotonic()
    found.add(BURST, TIMES)
    assert found.times[BURST] == TIMES
    assert len(found.over[BURST]) == len(TIMES)
    assert before <= found.over[BURST][0] <= time.monotonic()


def test_a_folder_without_one(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="bench-prediction"):
        prediction_record.read(tmp_path)
