"""Two may pause an instance; it goes on when both let it."""

from __future__ import annotations

from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.replay.fleet import SimNode
from tests.helpers import make_scenario


def test_it_goes_on_when_the_last_lets_it() -> None:
    node = SimNode("i", SimInstance(make_scenario().instance))
    node.pause("scheduler", 1.0, "keep", False)
    node.pause("trainer", 1.0, "keep", False)
    assert len(node.instance.advance(1.0)) == 2
    assert list(node.pausing) == ["scheduler", "trainer"]
    assert not node.resume("trainer", 2.0)
    assert node.resume("scheduler", 2.0)


def test_its_report_bears_its_name() -> None:
    report = SimNode("i", SimInstance(make_scenario().instance)).report()
    assert (report.instance, report.running, report.waiting) == ("i", 0, 0)
