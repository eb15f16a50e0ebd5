"""Instances that go and come; one engine step takes one second."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.errors import CallerError
from rollout_sched.simulators.replay.faults import Joins, Leaving, Lost
from tests.helpers import Watched, make_policy, make_scenario, make_trace, watch

SYNC = make_policy("sync", weights={"when": "between_batches"})


def instances(ran: Watched) -> list[tuple[float, str]]:
    return [(now, action.instance) for now, action in ran.said(act.Dispatch)]


class TestLost:
    fault = Lost(at_s=3.5, instance=0)

    def run(self, **scenario: Any) -> Watched:
        scenario = {"instances": 2, "faults": [self.fault], **scenario}
        return watch(SYNC, make_trace({"a": [8]}), make_scenario(**scenario))

    def test_what_it_held_is_made_again_elsewhere(self) -> None:
        ran = self.run()
        assert ran.said(ev.InstanceLost) == [(3.5, ev.InstanceLost("instance-0", "lost"))]
        assert instances(ran) == [(0.0, "instance-0"), (3.5, "instance-1")]
        assert ran.deliveries == [(11.5, ["a"])]
        assert not ran.scheduler.books.anomalies

    def test_what_was_streamed_is_not_lost(self) -> None:
        """Three steps were over by then; the interval at which streams are told does not matter."""
        ran = self.run(stream_s=100.0)
        assert [event.tokens for _, event in ran.said(ev.TokensArrived)] == [3]
        assert ran.deliveries == [(8.5, ["a"])]
        assert [s.tokens for s in ran.samples[0].segments] == [3, 5]

    def test_what_it_answers_afterwards_is_not_heard(self) -> None:
        ran = self.run()
        assert [now for now, _ in ran.said(ev.RequestFinished)] == [11.5]

    def test_it_returns_with_the_weights_it_started_with(self) -> None:
        fault = Lost(at_s=6.0, instance=1, returns_after_s=20.0)
        trace = make_trace({"a": [5], "b": [30], "c": [4]})
        ran = watch(SYNC, trace, make_scenario(instances=2, faults=[fault]))
        now, joined = ran.said(ev.InstanceJoined)[-1]
        assert (now, joined.instance, joined.version) == (26.0, "instance-1", 0)
        loads = [(now, e.version) for now, e in ran.said(ev.WeightsUpdated)]
        assert (28.0, 1) in loads, "it gets the newest before its first request"

    def test_weights_on_their_way_to_it_never_arrive(self) -> None:
        # a is trained at 5-15 s, and its weights are under way at 15-17 s.
        fault = Lost(at_s=16.0, instance=0, returns_after_s=0.5)
        trace = make_trace({"a": [5], "b": [4]})
        ran = watch(SYNC, trace, make_scenario(faults=[fault]))
        assert [now for now, _ in ran.said(ev.WeightsUpdated)] == [18.5]
        assert not ran.scheduler.books.anomalies

    def test_what_is_gone_is_not_lost_again(self) -> None:
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

    def test_it_finishes_what_it_has_and_takes_nothing_new(self) -> None:
        ran = self.run()
        assert instances(ran) == [(0.0, "instance-0"), (0.0, "instance-1"), (3.0, "instance-1")]
        assert ran.said(act.Release)[0][0] == 8.0
        assert ran.said(ev.InstanceLost) == [
            (8.0, ev.InstanceLost("instance-0", "drained", asked=True))
        ]
        assert ran.samples[0].response_tokens == 3

    def test_it_returns_some_time_after_it_has_gone(self) -> None:
        assert [now for now, _ in self.run(returns_after_s=4.0).said(ev.InstanceJoined)][2:] == [12]

    def test_one_that_dies_meanwhile_is_lost(self) -> None:
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
