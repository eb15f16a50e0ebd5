"""How fast servers are at a moment: the same requests, again and again.

A virtual machine is faster one minute and slower the next, by what others do on its host. What is
to be judged is what constants say; so each run is predicted with constants that are scaled by how
fast the servers were just before and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

import msgspec

from rollout_sched.calibration.bursts import SHORT, Burst
from rollout_sched.calibration.prober import Prober
from rollout_sched.live.ports import InstanceClient
from rollout_sched.simulators.instance.cost_model import CostModel

#: Seconds of each yardstick.
Pace = tuple[float, ...]

#: How often each is measured at a moment.
_ROUNDS = 3


def yardsticks(slots: int) -> tuple[Burst, ...]:
    """Half a second in all on a small server: few sequences, many, and with more context."""
    return Burst(2, SHORT, 32), Burst(slots, SHORT, 32), Burst(slots, 4 * SHORT, 16)


class PaceMaker:
    """Measures instances that nobody else uses. `seed`: of prompts that no cache has."""

    def __init__(self, instances: Sequence[InstanceClient], slots: int, seed: int) -> None:
        self._prober = Prober(instances, seed)
        self._yardsticks = yardsticks(slots)

    async def take(self) -> Pace:
        rounds = [
            [await self._prober.burst(burst) for burst in self._yardsticks] for _ in range(_ROUNDS)
        ]
        return tuple(
            median(time.last_s for times in each for time in times)
            for each in zip(*rounds, strict=True)
        )


def between(before: Pace, after: Pace) -> Pace:
    """What it was from the one moment to the other."""
    return tuple(map(mean, zip(before, after, strict=True)))


def slowness(pace: Pace, reference: Sequence[Pace]) -> float:
    """How much longer steps take than they did at the times of reference."""
    usual = [median(seconds) for seconds in zip(*reference, strict=True)]
    return median(seconds / long for seconds, long in zip(pace, usual, strict=True))


def scaled(cost: CostModel, factor: float) -> CostModel:
    """Constants of a machine on which everything takes so many times as long."""
    seconds = {
        name: value * factor
        for name, value in msgspec.structs.asdict(cost).items()
        if name.endswith("_s")
    }
    return msgspec.structs.replace(cost, **seconds)
