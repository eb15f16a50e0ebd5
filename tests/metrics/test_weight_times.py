"""New weights: to one instance, and until all have them."""

from __future__ import annotations

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.records import RunState
from rollout_sched.metrics.live import WeightTimes
from tests.metrics.told import Entry, tell


def joined(name: str, version: int = 0) -> Entry:
    return 0.0, ev.InstanceJoined(name, 8, 1000, version), []


def updated(now: float, name: str, version: int) -> Entry:
    return now, ev.WeightsUpdated(name, version), []


def test_each_load_and_the_whole() -> None:
    told: list[tuple[int, int, float]] = []
    times = WeightTimes(lambda *about: told.append(about))
    orders: list[act.Action] = [act.UpdateWeights("a", 1), act.UpdateWeights("b", 1)]
    tell(times, [joined("a"), joined("b"), (5.0, ev.WeightsPublished(1), orders)])
    tell(times, [updated(7.0, "a", 1)])
    assert (times.load.sum, sum(times.sync.counts), told) == (2.0, 0, [])
    tell(times, [updated(9.0, "b", 1)])
    assert (times.load.sum, times.sync.sum, told) == (6.0, 4.0, [(1, 2, 4.0)])


def test_who_is_lost_is_not_waited_for() -> None:
    times = WeightTimes()
    tell(times, [joined("a"), joined("b"), (5.0, ev.WeightsPublished(1), [])])
    tell(times, [updated(7.0, "a", 1), (8.0, ev.InstanceLost("b"), [])])
    assert times.sync.sum == 3.0
    assert sum(times.load.counts) == 0, "nobody ordered it: the trainer has brought it"


def test_a_newer_version_takes_the_place_of_one_that_nobody_has_whole() -> None:
    times = WeightTimes()
    tell(times, [joined("a"), (5.0, ev.WeightsPublished(1), []), (6.0, ev.WeightsPublished(2), [])])
    tell(times, [updated(7.0, "a", 1)])
    assert sum(times.sync.counts) == 0
    tell(times, [updated(8.0, "a", 2)])
    assert times.sync.sum == 2.0


def test_after_a_restart_they_join_anew() -> None:
    times = WeightTimes()
    tell(times, [joined("a"), joined("b"), (5.0, ev.WeightsPublished(1), [])])
    tell(times, [(6.0, ev.Restored(RunState()), []), joined("a"), updated(9.0, "a", 1)])
    assert times.sync.sum == 4.0
