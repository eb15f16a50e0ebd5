"""Polls and streams at their intervals; what is streamed of an attempt that has failed is not."""

from __future__ import annotations

from rollout_sched.core.model import events as ev
from rollout_sched.simulators.replay.faults import Failing, Lost
from tests.helpers import make_policy, make_scenario, make_trace, watch

POLICY = make_policy("sync")


def test_who_is_gone_is_not_polled() -> None:
    scenario = make_scenario(instances=2, poll_s=2.0, faults=[Lost(at_s=3.0, instance=1)])
    ran = watch(POLICY, make_trace({"a": [7]}), scenario)
    polls = [now for now, event in ran.said(ev.InstanceReported) if event.instance == "instance-1"]
    assert polls == [2.0]


def test_nothing_is_heard_of_an_attempt_that_has_failed() -> None:
    """It fails within a step; the stream is read before the instance has got rid of it."""
    faults = [Failing(at_s=0.0, for_s=1.0, after_s=2.4)]
    ran = watch(POLICY, make_trace({"a": [7]}), make_scenario(stream_s=2.5, faults=faults))
    heard = [(now, event.attempt) for now, event in ran.said(ev.TokensArrived)]
    assert (2.4, 1) in heard
    assert not [attempt for now, attempt in heard if attempt == 1 and now > 2.4]
    assert not ran.scheduler.books.anomalies
