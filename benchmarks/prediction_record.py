"""The data for a prediction, in a folder, so that it can be repeated without servers."""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path

import msgspec

from benchmarks.core_pace import CorePaces, PacedTime, PaceSample, factor, felt
from rollout_sched.calibration.bursts import Burst, BurstTime
from rollout_sched.calibration.calibration import Calibration, Measurements
from rollout_sched.core.errors import CallerError

_INDEX = "recorded.json"


class Arm(msgspec.Struct, frozen=True):
    """One run on real servers, with its start and end (monotonic clock); `preempted`: how often
    they preempted a request in it."""

    journal: str
    workload: str
    policy: str
    preempted: int
    began: float
    ended: float


class TimedMeasurements(Measurements):
    """Measurements with the time when each was over."""

    def __init__(self) -> None:
        super().__init__()
        self.over: dict[Burst, list[float]] = {}

    def add(self, burst: Burst, times: list[BurstTime]) -> None:
        super().add(burst, times)
        self.over.setdefault(burst, []).extend([time.monotonic()] * len(times))


class Record(msgspec.Struct, frozen=True, dict=True):
    """All measurements; the arms' journals are in the same folder.

    calibration  the last one, with the constants fitted to all of them
    bursts       their measurements: each time, and when it was over
    samples      of the speed of the engines' core, over the whole time
    """

    calibration: Calibration
    bursts: list[tuple[Burst, list[BurstTime], list[float]]]
    samples: list[PaceSample]
    arms: list[Arm]

    @cached_property
    def paces(self) -> CorePaces:
        return CorePaces(self.samples)

    @cached_property
    def share(self) -> float:
        """The share of a core's slowness that bursts feel."""
        return felt(
            {
                burst: [
                    PacedTime(taken.last_s, self._slow(taken, at))
                    for taken, at in zip(times, over, strict=True)
                ]
                for burst, times, over in self.bursts
            }
        )

    @cached_property
    def measurements(self) -> Measurements:
        """The measurements as on a core at full speed."""
        found = Measurements()
        for burst, times, over in self.bursts:
            for taken, at in zip(times, over, strict=True):
                by = factor(self._slow(taken, at), self.share)
                found.add(burst, [BurstTime(taken.first_s / by, taken.last_s / by)])
        return found

    def slowness(self, arm: Arm) -> float:
        """How many times as long steps took as on a core at full speed."""
        return factor(self.paces.between(arm.began, arm.ended), self.share)

    def _slow(self, taken: BurstTime, over: float) -> float:
        return self.paces.between(over - taken.last_s, over)

    def write(self, folder: Path) -> None:
        (folder / _INDEX).write_bytes(msgspec.json.encode(self))


def journal_of(workload: str, policy: str, repetition: int) -> str:
    """The name of an arm's journal."""
    return f"{repetition}-{workload}-{policy}.jsonl"


def read(folder: Path) -> Record:
    """Raises CallerError for a folder without a record."""
    try:
        return msgspec.json.decode((folder / _INDEX).read_bytes(), type=Record)
    except (OSError, msgspec.ValidationError, msgspec.DecodeError) as error:
        raise CallerError(f"{folder}: no record of `make bench-prediction`: {error}") from error
