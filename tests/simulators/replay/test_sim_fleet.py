"""Attempts and tools that fail; one engine step takes one second."""

from __future__ import annotations

from typing import Any

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.simulators.replay.faults import Failing, ToolsFailing
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
        assert not ran.scheduler.books.anomalies, "the instance's own answer is not heard"

    def test_what_it_streamed_is_gone_on_from(self) -> None:
        ran = self.run(after_s=2.5, stream_s=100.0)
        assert [event.tokens for _, event in ran.said(ev.TokensArrived)] == [2]
        assert ran.deliveries == [(8.5, ["a"])]

    def test_one_that_ends_before_has_not_failed(self) -> None:
        assert not self.run(after_s=9.0).said(ev.RequestFailed)

    def test_an_instance_that_is_not_reached_rests(self) -> None:
        ran = self.run(blame="instance", for_s=1.0)
        assert ran.said(act.Wake)
        assert instances(ran) == [(0.0, "instance-0"), (0.0, "instance-1")]

    def test_a_prompt_that_nobody_takes_is_given_up(self) -> None:
        faults = [Failing(at_s=0.0, for_s=3.0, blame="request")]
        scenario = make_scenario(slots=1, faults=faults)
        ran = watch(SYNC, make_trace({"a": [2], "b": [3], "c": [4]}), scenario)
        assert {d.group for _, d in ran.said(act.Discard)} == {"a", "b", "c"}
        assert ran.total_s == 0.0
        assert not ran.deliveries


def test_a_tool_that_fails_takes_its_group_with_it() -> None:
    samples = [SampleRecord(f"g{i}", 0, 4, (Turn(2, 1, 3.0), Turn(2))) for i in range(2)]
    scenario = make_scenario(faults=[ToolsFailing(at_s=0.0, for_s=6.0)])
    ran = watch(SYNC, Trace("t", gather(samples)), scenario)
    assert ran.said(ev.TrajectoryEnded) == [(5.0, ev.TrajectoryEnded("g0/0", 1, "failed"))]
    assert [groups for _, groups in ran.deliveries] == [["g1"]]
    assert not ran.scheduler.books.anomalies


def test_what_is_thrown_away_takes_its_tools_with_it() -> None:
    """The first tool fails, and the group with it; the other was to return 3 s later."""
    samples = [SampleRecord("g", i, 4, (Turn(2, 1, 3.0 * (i + 1)), Turn(2))) for i in range(2)]
    samples.append(SampleRecord("h", 0, 4, (Turn(20),)))
    scenario = make_scenario(faults=[ToolsFailing(at_s=0.0)], slots=3)
    ran = watch(SYNC, Trace("t", gather(samples)), scenario)
    assert ran.said(ev.TrajectoryEnded) == [(5.0, ev.TrajectoryEnded("g/0", 1, "failed"))]
    assert not ran.said(ev.ToolReturned)
    assert not ran.scheduler.books.anomalies
