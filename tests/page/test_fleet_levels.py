"""How busy a fleet was."""

from __future__ import annotations

from rollout_sched.core.model.events import InstanceReported
from rollout_sched.page.run_page import FleetLevels


def test_what_all_have_reported_counts() -> None:
    levels = FleetLevels()
    levels.set(0.0, 3, 1)
    levels.report(0.0, InstanceReported("i", 1, 2, 0.2))
    levels.report(0.0, InstanceReported("j", 1, 4, 0.6))
    levels.report(1.0, InstanceReported("j", 1, 0, 0.0))
    told = levels.told(2.0)
    half = round(1.0 / told["width_s"])
    assert set(told["in_flight"]) == {3.0}
    assert set(told["queued"][:half]) == {6.0}
    assert set(told["queued"][half:]) == {2.0}
    assert set(told["kv"][:half]) == {0.4}
    assert set(told["kv_most"][half + 1 :]) == {0.2}


def test_who_is_gone_counts_no_more() -> None:
    levels = FleetLevels()
    levels.report(0.0, InstanceReported("i", 1, 2, 0.2))
    levels.report(0.0, InstanceReported("j", 1, 4, 0.6))
    levels.gone("j")
    levels.report(1.0, InstanceReported("i", 1, 2, 0.2))
    assert levels.told(2.0)["queued"][-1] == 2.0
