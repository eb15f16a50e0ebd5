"""How fast servers are at a moment, and what constants are worth then."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.machine_pace import PaceMaker, between, scaled, slowness, yardsticks
from rollout_sched.simulators.instance.step_time import StepTime
from tests.calibration import virtual
from tests.calibration.virtual import COST, SPEC


def test_half_as_fast_is_twice_as_slow() -> None:
    async def taken(factor: float) -> tuple[float, ...]:
        spec = msgspec.structs.replace(SPEC, cost=scaled(COST, factor))
        return await PaceMaker([virtual.instance(spec)], 16, seed=1).take()

    usual = virtual.in_virtual_time(lambda: taken(1.0))
    slow = virtual.in_virtual_time(lambda: taken(2.0))
    assert len(usual) == len(yardsticks(16))
    assert slowness(slow, [usual]) == pytest.approx(2.0)
    assert slowness(between(usual, slow), [usual, slow, usual]) == pytest.approx(1.5)


def test_everything_takes_as_many_times_as_long() -> None:
    slow, usual = StepTime(scaled(COST, 1.5)), StepTime(COST)
    for step in ((7, 7, 7000, 0.0, 0), (3, 200, 900, 2e4, 2)):
        assert slow.step(*step) == pytest.approx(1.5 * usual.step(*step))
    assert scaled(COST, 1.5).exponent == COST.exponent
