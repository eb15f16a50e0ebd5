"""A scheduler that dies, and the one that goes on from what was written down."""

from __future__ import annotations

from rollout_sched.core.model import events as ev
from rollout_sched.core.restart.facts import state_of
from rollout_sched.simulators.replay.closed_loop import Restarts
from tests.core.told import make_scheduler


def test_the_next_one_is_told_what_the_earlier_one_stood_at() -> None:
    first = make_scheduler()
    restarts = Restarts(first, make_scheduler)
    events = [ev.GroupSubmitted("a", 1, 10, 100), ev.BatchRequested(), ev.InstanceLost("nobody")]
    for event in events:
        restarts.observe(2.0, event, first.handle(event, 2.0))
    second, restored = restarts.restart()
    assert restored == ev.Restored(state_of(first, 2.0))
    assert restarts.anomalies == {"unknown_instance": 1}
    restarts.observe(3.0, restored, second.handle(restored, 3.0))
    third, restored = restarts.restart()
    assert restored == ev.Restored(state_of(second, 3.0))
    assert third is not second
