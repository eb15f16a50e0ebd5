"""Attempts and tools that fail; one engine step takes one second."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.replay.attempts import SimAttempts
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.faults import (
    Failing,
    Fault,
    Joins,
    Leaving,
    Lost,
    Slow,
    ToolsFailing,
)
from rollout_sched.simulators.replay.fleet import SimFleet, SimNode
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn, gather
from tests.helpers import Watched, make_policy, make_scenario, make_trace, watch

SYNC = make_policy("sync", weights={"when": "between_batches"})


def instances(ran: Watched) -> list[tuple[float, str]]:
    return [(now, action.instance) for now, action in ran.said(act.Dispatch)]


class TestFailing:
    def run(self, *, stream_s: float = 0.0, **fault: Any) -> Watched:
        faults = [Failing(at_s=0.0, instance=0, **fault)]
        scenario = make_scenario(instances=2, slots=2, stream_s=stream_s, faults=faults)
        return watch(SYNC, make_trace({"a": [8]}), scenario)

    def test_an_attempt_fails_after_its_time(self) -> None:
        ran = self.run(after_s=2.5)
        now, event = ran.said(ev.RequestFailed)[0]
        assert (now, event.attempt, event.blame, event.usable) == (2.5, 1, "unclear", True)
        assert instances(ran) == [(0.0, "instance-0"), (2.5, "instance-1")]
        assert ran.deliveries == [(10.5, ["a"])]
        assert not ran.scheduler.state.anomalies, "the instance's own answer is not heard"

    def test_a_failed_attempt_resumes_from_streamed_tokens(self) -> None:
        ran = self.run(after_s=2.5, stream_s=100.0)
        assert [event.tokens for _, event in ran.said(ev.TokensArrived)] == [2]
        assert ran.deliveries == [(8.5, ["a"])]

    def test_an_attempt_that_ends_earlier_does_not_fail(self) -> None:
        assert not self.run(after_s=9.0).said(ev.RequestFailed)

    def test_an_instance_that_is_not_reached_rests(self) -> None:
        ran = self.run(blame="instance", for_s=1.0)
        assert ran.said(act.Wake)
        assert instances(ran) == [(0.0, "instance-0"), (0.0, "instance-1")]

    def test_a_prompt_without_takers_is_given_up(self) -> None:
        faults = [Failing(at_s=0.0, for_s=3.0, blame="request")]
        scenario = make_scenario(slots=1, faults=faults)
        ran = watch(SYNC, make_trace({"a": [2], "b": [3], "c": [4]}), scenario)
        assert {d.group for _, d in ran.said(act.Discard)} == {"a", "b", "c"}
        assert ran.total_s == 0.0
        assert not ran.deliveries


class TestSlow:
    def ended_s(self, tokens: int, *faults: Fault) -> float:
        ran = watch(SYNC, make_trace({"a": [tokens]}), make_scenario(slots=1, faults=faults))
        ((now, _),) = ran.deliveries
        return now

    def test_every_step_takes_so_many_times_as_long(self) -> None:
        assert self.ended_s(8, Slow(at_s=0.0, instance=0, factor=3.0)) == 24.0

    def test_only_within_its_time(self) -> None:
        """A step that has begun keeps its pace: 2 of 1 s, 2 of 3 s, 4 of 1 s."""
        assert self.ended_s(8, Slow(at_s=1.5, for_s=5.0, instance=0, factor=3.0)) == 12.0

    def test_factors_of_the_same_time_multiply(self) -> None:
        faults = [Slow(at_s=0.0, instance=0), Slow(at_s=0.0, for_s=6.0, instance=0, factor=3.0)]
        assert self.ended_s(3, *faults) == 10.0

    def test_an_instance_that_returns_is_as_slow(self) -> None:
        lost = Lost(at_s=3.0, instance=0, returns_after_s=2.0)
        assert self.ended_s(4, Slow(at_s=1.0, instance=0), lost) == 13.0

    def test_fast_instances_are_given_more_work(self) -> None:
        faults = [Slow(at_s=0.0, instance=0, factor=4.0)]
        scenario = make_scenario(instances=2, slots=1, prompts_per_step=5, faults=faults)
        ran = watch(SYNC, make_trace({name: [4] for name in "abcde"}), scenario)
        assert sorted(name for _, name in instances(ran)) == ["instance-0"] + ["instance-1"] * 4
        assert ran.deliveries[0][0] == 16.0


def test_a_tool_that_fails_takes_its_group_with_it() -> None:
    samples = [SampleRecord(f"g{i}", 0, 4, (Turn(2, 1, 3.0), Turn(2))) for i in range(2)]
    scenario = make_scenario(faults=[ToolsFailing(at_s=0.0, for_s=6.0)])
    ran = watch(SYNC, Trace("t", gather(samples)), scenario)
    assert ran.said(ev.TrajectoryEnded) == [(5.0, ev.TrajectoryEnded("g0/0", 1, "failed"))]
    assert [groups for _, groups in ran.deliveries] == [["g1"]]
    assert not ran.scheduler.state.anomalies


def test_a_discarded_group_ends_its_tools() -> None:
    """The first tool fails, and the group with it; the other was to return 3 s later."""
    samples = [SampleRecord("g", i, 4, (Turn(2, 1, 3.0 * (i + 1)), Turn(2))) for i in range(2)]
    samples.append(SampleRecord("h", 0, 4, (Turn(20),)))
    scenario = make_scenario(faults=[ToolsFailing(at_s=0.0)], slots=3)
    ran = watch(SYNC, Trace("t", gather(samples)), scenario)
    assert ran.said(ev.TrajectoryEnded) == [(5.0, ev.TrajectoryEnded("g/0", 1, "failed"))]
    assert not ran.said(ev.ToolReturned)
    assert not ran.scheduler.state.anomalies


def test_an_instance_resumes_when_all_pauses_are_released() -> None:
    node = SimNode("i", SimInstance(make_scenario().instance))
    node.pause("scheduler", 1.0, "keep", False)
    node.pause("trainer", 1.0, "keep", False)
    assert len(node.instance.advance(1.0)) == 2
    assert list(node.pausing) == ["scheduler", "trainer"]
    assert not node.resume("trainer", 2.0)
    assert node.resume("scheduler", 2.0)


def test_a_report_names_its_instance() -> None:
    report = SimNode("i", SimInstance(make_scenario().instance)).report()
    assert (report.instance, report.running, report.waiting) == ("i", 0, 0)


class TestLost:
    fault = Lost(at_s=3.5, instance=0)

    def run(self, **scenario: Any) -> Watched:
        scenario = {"instances": 2, "faults": [self.fault], **scenario}
        return watch(SYNC, make_trace({"a": [8]}), make_scenario(**scenario))

    def test_requests_of_a_lost_instance_restart_elsewhere(self) -> None:
        ran = self.run()
        assert ran.said(ev.InstanceLost) == [(3.5, ev.InstanceLost("instance-0", "lost"))]
        assert instances(ran) == [(0.0, "instance-0"), (3.5, "instance-1")]
        assert ran.deliveries == [(11.5, ["a"])]
        assert not ran.scheduler.state.anomalies

    def test_streamed_tokens_survive_a_lost_instance(self) -> None:
        """Three steps were over by then; the interval at which streams are told does not matter."""
        ran = self.run(stream_s=100.0)
        assert [event.tokens for _, event in ran.said(ev.TokensArrived)] == [3]
        assert ran.deliveries == [(8.5, ["a"])]
        assert [s.tokens for s in ran.samples[0].segments] == [3, 5]

    def test_answers_of_a_lost_instance_are_ignored(self) -> None:
        ran = self.run()
        assert [now for now, _ in ran.said(ev.RequestFinished)] == [11.5]

    def test_a_lost_instance_returns_with_initial_weights(self) -> None:
        fault = Lost(at_s=6.0, instance=1, returns_after_s=20.0)
        trace = make_trace({"a": [5], "b": [30], "c": [4]})
        ran = watch(SYNC, trace, make_scenario(instances=2, faults=[fault]))
        now, joined = ran.said(ev.InstanceJoined)[-1]
        assert (now, joined.instance, joined.version) == (26.0, "instance-1", 0)
        loads = [(now, e.version) for now, e in ran.said(ev.WeightsUpdated)]
        assert (28.0, 1) in loads, "it gets the newest before its first request"

    def test_a_lost_instance_does_not_receive_pending_weights(self) -> None:
        # a is trained at 5-15 s, and its weights are under way at 15-17 s.
        fault = Lost(at_s=16.0, instance=0, returns_after_s=0.5)
        trace = make_trace({"a": [5], "b": [4]})
        ran = watch(SYNC, trace, make_scenario(faults=[fault]))
        assert [now for now, _ in ran.said(ev.WeightsUpdated)] == [18.5]
        assert not ran.scheduler.state.anomalies

    def test_a_lost_instance_is_not_lost_twice(self) -> None:
        again = Lost(at_s=4.0, instance=0)
        assert len(self.run(faults=[self.fault, again]).said(ev.InstanceLost)) == 1

    def test_a_run_without_instances_says_so(self) -> None:
        with pytest.raises(CallerError, match=r"every instance is gone; .* returns_after_s"):
            self.run(instances=1)


class TestLeaving:
    def run(self, **fault: Any) -> Watched:
        faults = [Leaving(at_s=2.0, instance=0, **fault)]
        scenario = make_scenario(instances=2, slots=1, faults=faults)
        return watch(SYNC, make_trace({"a": [8, 3, 4]}), scenario)

    def test_a_leaving_instance_finishes_and_takes_nothing_new(self) -> None:
        ran = self.run()
        assert instances(ran) == [(0.0, "instance-0"), (0.0, "instance-1"), (3.0, "instance-1")]
        assert ran.said(act.Release)[0][0] == 8.0
        assert ran.said(ev.InstanceLost) == [
            (8.0, ev.InstanceLost("instance-0", "drained", requested=True))
        ]
        assert ran.samples[0].response_tokens == 3

    def test_a_leaving_instance_returns_later(self) -> None:
        assert [now for now, _ in self.run(returns_after_s=4.0).said(ev.InstanceJoined)][2:] == [12]

    def test_an_instance_that_dies_while_leaving_is_lost(self) -> None:
        faults = [Leaving(at_s=2.0, instance=0, returns_after_s=1.0), Lost(at_s=4.0, instance=0)]
        ran = watch(SYNC, make_trace({"a": [8]}), make_scenario(instances=2, faults=faults))
        assert ran.said(ev.InstanceLost) == [(4.0, ev.InstanceLost("instance-0", "lost"))]
        assert len(ran.said(ev.InstanceJoined)) == 2


def test_an_instance_may_join_late() -> None:
    scenario = make_scenario(instances=2, slots=1, faults=[Joins(at_s=2.5, instance=0)])
    ran = watch(SYNC, make_trace({"a": [8, 3]}), scenario)
    assert [(now, e.instance) for now, e in ran.said(ev.InstanceJoined)] == [
        (0.0, "instance-1"),
        (2.5, "instance-0"),
    ]
    assert instances(ran) == [(0.0, "instance-1"), (2.5, "instance-0")]


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
    def test_lent_instances_are_drained_in_turn_and_all_requests_continue(self) -> None:
        world = Lent()
        world.gpus.lend("i0")
        world.settle()
        world.gpus.lend("i2")
        world.settle()
        assert world.shares == pytest.approx([1 / 3, 2 / 3])
        assert world.paused() == ["i0", "i2"]
        assert world.gpus.resume_all() == ["i0", "i2"]
        assert world.paused() == []

    def test_a_drained_instance_is_not_awaited_again(self) -> None:
        world = Lent()
        world.gpus.lend("i0")
        world.settle()
        world.gpus.stop_all(clear_cache=True)
        assert world.stops == 0
        world.settle()
        assert world.stops == 1
        assert world.paused() == ["i0", "i1", "i2"]

    def test_a_draining_instance_is_awaited(self) -> None:
        world = Lent()
        world.gpus.lend("i0")
        world.gpus.stop_all(clear_cache=True)
        world.settle()
        assert world.stops == 1

    def test_a_lent_instance_is_reclaimed(self) -> None:
        world = Lent()
        world.gpus.lend("i0")
        world.settle()
        world.gpus.take_back("i0")
        assert world.shares == pytest.approx([1 / 3, 0.0])
        assert world.paused() == []

    def test_a_lost_instance_is_no_longer_lent(self) -> None:
        world = Lent()
        world.gpus.lend("i0")
        world.settle()
        world.gpus.instance_gone(world.fleet.nodes.pop("i0"))
        assert world.shares == pytest.approx([1 / 3, 0.0])
        assert world.gpus.resume_all() == []


class TestColocated:
    def run(self, *faults: Any) -> Watched:
        scenario = make_scenario(instances=2, colocated=True, keeps_kv=True, faults=faults)
        return watch(ASYNC, make_trace({"a": [2], "b": [20]}), scenario)

    def test_training_does_not_wait_for_a_lost_instance(self) -> None:
        """b's instance dies at the very moment at which it is to make way."""
        trace, fault = make_trace({"a": [2], "b": [20]}), Lost(at_s=2.5, instance=1)
        scenario = make_scenario(instances=2, colocated=True, keeps_kv=True, faults=[fault])
        ran = watch(ASYNC, trace, scenario)
        assert ran.said(ev.WeightsPublished)[0][0] <= 13.0
        assert [groups for _, groups in ran.deliveries] == [["a"], ["b"]]

    def test_an_instance_joining_during_training_is_paused(self) -> None:
        ran = self.run(Joins(at_s=5.0, instance=1))
        # a is trained at 2-12 s; b has made 2 or 3 tokens then, and has the rest to make.
        assert ran.said(ev.InstanceJoined)[-1][0] == 5.0
        assert not [now for now, _ in ran.said(ev.RequestFinished) if 3.0 < now < 12.0]
        assert ran.deliveries[-1][1] == ["b"]
