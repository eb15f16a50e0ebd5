"""One step: its bubbles are shares of its instance-seconds."""

from __future__ import annotations

import pytest

from rollout_sched.metrics import Step


def test_bubbles_are_shares_of_the_instance_seconds() -> None:
    idle, vacant = {"barrier": 10.0, "queue_empty": 10.0}, {"barrier": 10.0, "kv_stall": 30.0}
    step = Step(0, 0.0, capacity_s=80.0, idle_s=idle, vacant_s=vacant)
    assert step.idle_bubble == pytest.approx(0.25)
    assert step.occupancy_bubble == pytest.approx(0.5)


def test_a_step_without_instances_has_no_bubbles() -> None:
    step = Step(0, 0.0)
    assert (step.idle_bubble, step.occupancy_bubble) == (0.0, 0.0)
