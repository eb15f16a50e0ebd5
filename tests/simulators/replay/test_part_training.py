"""Work that comes in parts and is done meanwhile, on more or fewer GPUs."""

from __future__ import annotations

import pytest

from rollout_sched.simulators.replay.sim_trainer import PartTraining


def test_without_gpus_nothing_is_done() -> None:
    work = PartTraining(0.0)
    work.add(5.0, 1.0)
    assert work.left_s(100.0) == 5.0


def test_half_of_the_gpus_take_twice_as_long() -> None:
    work = PartTraining(0.0)
    work.add(5.0, 0.0)
    work.set_share(0.5, 2.0)
    assert work.left_s(6.0) == pytest.approx(3.0)
    work.set_share(1.0, 8.0)
    assert work.left_s(9.0) == pytest.approx(1.0)
    assert work.left_s(99.0) == 0.0


def test_nothing_is_done_before_it_has_come() -> None:
    work = PartTraining(0.0)
    work.set_share(1.0, 0.0)
    work.add(2.0, 10.0)
    work.add(3.0, 20.0)
    assert work.left_s(20.0) == 3.0
    assert work.left_s(21.0) == 2.0
