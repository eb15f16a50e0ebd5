"""Instances make way for a trainer on their GPUs, whoever comes and goes meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.model import events as ev
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.replay.attempts import SimAttempts
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.faults import Joins, Lost
from rollout_sched.simulators.replay.fleet import SimFleet, SimNode
from rollout_sched.simulators.replay.workload import Workload
from tests.helpers import Watched, make_policy, make_scenario, make_trace, watch

ASYNC = make_policy(
    "async",
    batching="fully_async",
    freshness={"max_staleness": 5},
    interruption={"use": "partial", "kv": "retain", "at_update": "in_place"},
)


class Lent:
    """Three instances without work, and how large a share is lent when."""

    def __init__(self) -> None:
        scenario = make_scenario(instances=3)
        workload = Workload(make_trace({"a": [2]}), scenario.job)
        self.queue = EventQueue()
        self.fleet = SimFleet(scenario, SimAttempts(workload), self.queue, lambda event: None)
        for name in ("i0", "i1", "i2"):
            self.fleet.nodes[name] = SimNode(name, SimInstance(scenario.instance))
        self.gpus = self.fleet.gpus
        self.shares: list[float] = []
        self.stops = 0
        self.gpus.on_lent = lambda: self.shares.append(self.gpus.lent_share)
        self.gpus.on_stopped = self.stopped

    def stopped(self) -> None:
        self.stops += 1

    def settle(self) -> None:
        self.fleet.plan_changed()
        while len(self.queue):
            self.queue.step()
            self.fleet.plan_changed()

    def paused(self) -> list[str]:
        return [name for name, node in self.fleet.nodes.items() if node.paused_by]


class TestLending:
    def test_one_after_the_other_makes_way_and_all_go_on(self) -> None:
        world = Lent()
        world.gpus.lend("i0")
        world.settle()
        world.gpus.lend("i2")
        world.settle()
        assert world.shares == pytest.approx([1 / 3, 2 / 3])
        assert world.paused() == ["i0", "i2"]
        assert world.gpus.resume_all() == ["i0", "i2"]
        assert world.paused() == []

    def test_who_has_made_way_is_not_waited_for_again(self) -> None:
        world = Lent()
        world.gpus.lend("i0")
        world.settle()
        world.gpus.stop_all(clear_cache=True)
        assert world.stops == 0
        world.settle()
        assert world.stops == 1
        assert world.paused() == ["i0", "i1", "i2"]

    def test_one_that_is_about_to_make_way_is_waited_for(self) -> None:
        world = Lent()
        world.gpus.lend("i0")
        world.gpus.stop_all(clear_cache=True)
        world.settle()
        assert world.stops == 1

    def test_one_is_taken_back(self) -> None:
        world = Lent()
        world.gpus.lend("i0")
        world.settle()
        world.gpus.take_back("i0")
        assert world.shares == pytest.approx([1 / 3, 0.0])
        assert world.paused() == []

    def test_one_that_is_gone_is_lent_no_longer(self) -> None:
        world = Lent()
        world.gpus.lend("i0")
        world.settle()
        world.gpus.gone(world.fleet.nodes.pop("i0"))
        assert world.shares == pytest.approx([1 / 3, 0.0])
        assert world.gpus.resume_all() == []


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
