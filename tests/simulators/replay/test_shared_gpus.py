"""Instances make way for a trainer on their GPUs, whoever comes and goes meanwhile."""

from __future__ import annotations

from typing import Any

from rollout_sched.core import events as ev
from rollout_sched.simulators.replay.faults import Joins, Lost
from tests.helpers import Watched, make_policy, make_scenario, make_trace, watch

ASYNC = make_policy(
    "async",
    batching="fully_async",
    freshness={"max_staleness": 5},
    interruption={"use": "partial", "kv": "retain", "at_update": "in_place"},
)


class TestColocated:
    def run(self, *faults: Any) -> Watched:
        scenario = make_scenario(instances=2, colocated=True, keeps_kv=True, faults=faults)
        return watch(ASYNC, make_trace({"a": [2], "b": [20]}), scenario)

    def test_training_does_not_wait_for_one_that_is_lost(self) -> None:
        """b's instance dies at the very moment at which it is to make way."""
        trace, fault = make_trace({"a": [2], "b": [20]}), Lost(at_s=2.5, instance=1)
        scenario = make_scenario(instances=2, colocated=True, keeps_kv=True, faults=[fault])
        ran = watch(ASYNC, trace, scenario)
        assert ran.said(ev.WeightsPublished)[0][0] <= 13.0
        assert [groups for _, groups in ran.deliveries] == [["a"], ["b"]]

    def test_one_that_joins_meanwhile_stands_still_too(self) -> None:
        ran = self.run(Joins(at_s=5.0, instance=1))
        # a is trained at 2-12 s; b has made 2 or 3 tokens then, and has the rest to make.
        assert ran.said(ev.InstanceJoined)[-1][0] == 5.0
        assert not [now for now, _ in ran.said(ev.RequestFinished) if 3.0 < now < 12.0]
        assert ran.deliveries[-1][1] == ["b"]
