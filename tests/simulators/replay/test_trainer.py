"""The trainer model: seconds of a step and of a transfer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollout_sched.simulators.replay.scenario import TrainerModel, TransferCost


def test_a_step_costs_a_fixed_part_and_a_part_per_token() -> None:
    trainer = TrainerModel(fixed_s=5.0, seconds_per_token=1e-3)
    assert trainer.step_s(0) == 5.0
    assert trainer.step_s(2000) == pytest.approx(7.0)
    assert trainer.step_s(2000, last=False) == pytest.approx(2.0)


@pytest.mark.parametrize(("placement", "shared"), [("colocated", True), ("disaggregated", False)])
def test_placement(placement: Any, shared: bool) -> None:
    assert TrainerModel(placement=placement).colocated is shared


def test_a_transfer_takes_its_bytes_over_the_bandwidth() -> None:
    assert TransferCost(1.0, 15.2e9, 10e9).seconds == pytest.approx(2.52)
    assert TransferCost(0.5).seconds == 0.5


@pytest.mark.parametrize(
    "values", [{"fixed_s": -1.0}, {"bytes": -1.0}, {"bytes_per_s": 0.0}, {"speed": 1.0}]
)
def test_what_makes_no_sense_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(values, TransferCost)
