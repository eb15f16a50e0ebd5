"""What was measured is read again as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import prediction_record
from benchmarks.prediction_record import Arm, Record, journal_of
from rollout_sched.calibration.burst_times import BurstTime
from rollout_sched.calibration.bursts import Burst
from rollout_sched.core.errors import CallerError
from tests.calibration.test_scenario_text import FOUND


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    arm = Arm(journal_of("short", "areal", 0), "short", "areal", 3, (0.2, 0.3))
    bursts = [(Burst(4, 32, 8), [BurstTime(0.1, 0.2)])]
    record = Record(FOUND, [(0.1, 0.2)], bursts, [arm])
    record.write(tmp_path)
    found = prediction_record.read(tmp_path)
    assert found == record
    assert found.measurements.medians == {Burst(4, 32, 8): 0.2}
    assert found.slowness(arm) == pytest.approx(1.75)


def test_a_folder_without_one(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="bench-prediction"):
        prediction_record.read(tmp_path)
