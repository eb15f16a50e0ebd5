"""What a prediction is made from, in a folder: it can be made again without servers."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.machine_pace import Pace, slowness
from rollout_sched.calibration.burst_times import BurstTime
from rollout_sched.calibration.bursts import Burst
from rollout_sched.calibration.calibration import Calibration
from rollout_sched.calibration.measurements import Measurements
from rollout_sched.core.errors import CallerError

_INDEX = "recorded.json"


class Arm(msgspec.Struct, frozen=True):
    """One run on real servers; `preempted`: how often they preempted a request meanwhile; `pace`:
    how fast they were."""

    journal: str
    workload: str
    policy: str
    preempted: int
    pace: Pace


class Record(msgspec.Struct, frozen=True):
    """All that was measured; the arms' journals lie beside it. `paces`: how fast the servers were
    when they were calibrated."""

    calibration: Calibration
    paces: list[Pace]
    bursts: list[tuple[Burst, list[BurstTime]]]
    arms: list[Arm]

    @property
    def measurements(self) -> Measurements:
        found = Measurements()
        for burst, times in self.bursts:
            found.add(burst, times)
        return found

    def slowness(self, arm: Arm) -> float:
        """How much longer steps took than when the servers were calibrated."""
        return slowness(arm.pace, self.paces)

    def write(self, folder: Path) -> None:
        (folder / _INDEX).write_bytes(msgspec.json.encode(self))


def journal_of(workload: str, policy: str, repetition: int) -> str:
    """The name of an arm's journal."""
    return f"{repetition}-{workload}-{policy}.jsonl"


def read(folder: Path) -> Record:
    """Raises CallerError for a folder without one."""
    try:
        return msgspec.json.decode((folder / _INDEX).read_bytes(), type=Record)
    except (OSError, msgspec.ValidationError, msgspec.DecodeError) as error:
        raise CallerError(f"{folder}: no record of `make bench-prediction`: {error}") from error
