"""Instance-seconds by state."""

from __future__ import annotations

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.metrics.bubbles import FleetTimes
from tests.metrics.told import tell


def test_what_each_was_doing_until_it_was_looked_at_again() -> None:
    states: dict[str, str] = {}
    times = FleetTimes(lambda name: states.get(name, ""))
    states.update(a="idle", b="idle")
    tell(times, [(0.0, ev.InstanceJoined(name, 8, 1000), []) for name in "ab"])
    states["a"] = "busy"
    tell(times, [(2.0, ev.InstanceReported("a", 1, 0, 0.1), [])])
    assert times.seconds(3.0) == {"idle": 2.0 + 3.0, "busy": 1.0}
    states.update(a="pausing", b="updating")
    orders: list[act.Action] = [act.Pause("a", "keep", True), act.UpdateWeights("b", 1)]
    tell(times, [(4.0, ev.WeightsPublished(1), orders)])
    del states["b"]
    tell(times, [(10.0, ev.InstanceLost("b"), [])])
    assert times.seconds(11.0) == {"idle": 2.0 + 4.0, "busy": 2.0, "pausing": 7.0, "updating": 6.0}
