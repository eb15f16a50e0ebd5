"""The steps of a live run are those of its journal, and cost nothing where there are none."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.events import (
    RequestFinished,
    RequestSubmitted,
)
from rollout_sched.core.model.records import RunState
from rollout_sched.metrics.live import ClientTimes, LiveSteps, SampleTimes, WeightTimes
from rollout_sched.metrics.metrics import Metrics
from rollout_sched.metrics.results import Step
from tests.helpers import make_scenario, make_trace, watch
from tests.metrics.told import Entry, sample, tell


def test_live_metrics_equal_those_of_the_journal() -> None:
    trace = make_trace({f"g{number}": [3 + number, 20, 7] for number in range(8)})
    ran = watch("tail_batching", trace, make_scenario(instances=2, prompts_per_step=2))
    told: list[tuple[int, Step]] = []
    live, whole = LiveSteps(lambda number, step: told.append((number, step))), Metrics(8)
    for now, event, actions in ran.log:
        live.observe(now, event, actions)
        whole.observe(now, event, actions)
    assert len(told) == 4
    assert [number for number, _ in told] == [1, 2, 3, 4]
    # The occupancy bubble, which is not shown, is of a batch that nobody here knows.
    plain = [replace(step, vacant_s={}) for step in whole.steps]
    assert [replace(step, vacant_s={}) for _, step in told] == plain
    assert live.last is told[-1][1]
    assert live.capacity_s == pytest.approx(sum(step.capacity_s for step in plain))
    assert live.trainer_wait_s == sum(step.trainer_wait_s for step in plain)
    idle_s = sum(sum(step.idle_s.values()) for step in plain)
    assert sum(live.idle_s.values()) == pytest.approx(idle_s)
    assert live.duration.sum == pytest.approx(plain[-1].end_s)


def test_without_a_trainer_nothing_is_folded() -> None:
    live = LiveSteps()
    live.observe(1.0, RequestSubmitted("r", "r", 3, 9), [])
    live.observe(2.0, RequestFinished("r", 1, 5), [])
    assert live._metrics is None


def asked(now: float, name: str, *actions: act.Action) -> Entry:
    return now, ev.RequestSubmitted(name, name, 3, 9), list(actions)


def sent(name: str, attempt: int = 1) -> act.Dispatch:
    return act.Dispatch(name, attempt, "a", 3, 9, 0)


def kept(times: ClientTimes) -> int:
    return len(times._waiting) + len(times._sent)


def test_the_wait_ends_with_the_first_dispatch_and_the_duration_with_the_answer() -> None:
    times = ClientTimes()
    tell(
        times,
        [
            asked(1.0, "r"),
            (3.0, ev.Woke(), [sent("r")]),
            (4.0, ev.RequestFailed("r", 1), [sent("r", 2)]),
            (11.0, ev.RequestFinished("r", 2, 700), [act.Answer(sample("r", 700))]),
        ],
    )
    assert (times.wait.sum, sum(times.wait.counts)) == (2.0, 1)
    assert (times.duration.sum, sum(times.duration.counts)) == (10.0, 1)
    assert times.tokens.sum == 700
    assert kept(times) == 0


def test_cancelled_or_failed_request_has_no_duration() -> None:
    times = ClientTimes()
    gone = [act.Discard("r", 0, "withdrawn", ends=True), act.Discard("s", 4, "failed", ends=True)]
    tell(times, [asked(1.0, "r"), asked(1.0, "s", sent("s")), (2.0, ev.Woke(), list(gone))])
    assert sum(times.duration.counts) == 0
    assert kept(times) == 0


def test_restart_forgets_earlier_requests() -> None:
    times = ClientTimes()
    tell(times, [asked(1.0, "r"), asked(1.0, "s", sent("s")), (2.0, ev.Restored(RunState()), [])])
    assert kept(times) == 0


def test_group_requests_are_not_client_requests() -> None:
    times = ClientTimes()
    dispatch = act.Dispatch("g/0", 1, "a", 3, 9, 0, group="g")
    tell(times, [(0.0, ev.GroupSubmitted("g", 1, 3, 9), [dispatch])])
    assert sum(times.wait.counts) == 0
    assert kept(times) == 0


def submitted(now: float, group: str, *actions: act.Action) -> Entry:
    return now, ev.GroupSubmitted(group, 2, 3, 9), list(actions)


def sent_sample_times(group: str, index: int, attempt: int) -> act.Dispatch:
    return act.Dispatch(f"{group}/{index}", attempt, "a", 3, 9, 0, group=group, index=index)


def kept_sample_times(times: SampleTimes) -> int:
    return len(times._waiting) + len(times._under_way) + len(times._started)


def test_a_group_from_its_submission_to_its_delivery() -> None:
    times = SampleTimes()
    tell(
        times,
        [
            submitted(1.0, "g"),
            (4.0, ev.BatchRequested(), [sent_sample_times("g", 0, 1)]),
            (6.0, ev.Woke(), [sent_sample_times("g", 1, 2)]),
            (7.0, ev.RequestInterrupted("g/0", 1, 3), []),
            (8.0, ev.Woke(), [sent_sample_times("g", 0, 3)]),
            (9.0, ev.RequestFinished("g/1", 2, 5), []),
        ],
    )
    assert (times.wait.sum, sum(times.wait.counts)) == (3.0, 1)
    assert times.oldest_s(14.0) == 10.0
    samples = (sample("g/0", group="g"), sample("g/1", group="g"))
    tell(times, [(14.0, ev.TrajectoryEnded("g/0", 3), [act.Deliver(0, 0, samples)])])
    assert times.duration.sum == (9.0 - 6.0) + (14.0 - 4.0)
    assert times.oldest_s(20.0) == 0.0
    assert kept_sample_times(times) == 0


def test_oldest_group_is_the_first_begun() -> None:
    times = SampleTimes()
    tell(
        times,
        [
            submitted(0.0, "g", sent_sample_times("g", 0, 1)),
            submitted(2.0, "h", sent_sample_times("h", 0, 2)),
        ],
    )
    assert times.oldest_s(5.0) == 5.0
    tell(times, [(5.0, ev.Woke(), [act.Deliver(0, 0, (sample("g/0", group="g"),))])])
    assert times.oldest_s(5.0) == 3.0


def test_a_surplus_sample_ends_alone_a_failed_one_ends_its_group() -> None:
    times = SampleTimes()
    begun = [sent_sample_times("g", 0, 1), sent_sample_times("g", 1, 2)]
    tell(times, [submitted(0.0, "g", *begun), submitted(0.0, "h"), submitted(0.0, "i")])

    def thrown(group: str, index: int, reason: str) -> Entry:
        discard = act.Discard(f"{group}/{index}", 2, reason, ends=True, group=group, index=index)
        return 3.0, ev.Woke(), [discard]

    tell(times, [thrown("g", 1, "surplus")])
    assert times.oldest_s(3.0) == 3.0
    tell(times, [thrown("g", 0, "failed"), thrown("h", 0, "oversized")])
    assert times.oldest_s(3.0) == 0.0
    assert kept_sample_times(times) == 1, "one still waits"
    tell(times, [(4.0, ev.Restored(RunState()), [])])
    assert kept_sample_times(times) == 0


def joined(name: str, version: int = 0) -> Entry:
    return 0.0, ev.InstanceJoined(name, 8, 1000, version), []


def updated(now: float, name: str, version: int) -> Entry:
    return now, ev.WeightsUpdated(name, version), []


def test_each_load_and_the_full_rollout_are_timed() -> None:
    told: list[tuple[int, int, float]] = []
    times = WeightTimes(lambda *about: told.append(about))
    orders: list[act.Action] = [act.UpdateWeights("a", 1), act.UpdateWeights("b", 1)]
    tell(times, [joined("a"), joined("b"), (5.0, ev.WeightsPublished(1), orders)])
    tell(times, [updated(7.0, "a", 1)])
    assert (times.load.sum, sum(times.sync.counts), told) == (2.0, 0, [])
    tell(times, [updated(9.0, "b", 1)])
    assert (times.load.sum, times.sync.sum, told) == (6.0, 4.0, [(1, 2, 4.0)])


def test_lost_instance_does_not_delay_a_rollout() -> None:
    times = WeightTimes()
    tell(times, [joined("a"), joined("b"), (5.0, ev.WeightsPublished(1), [])])
    tell(times, [updated(7.0, "a", 1), (8.0, ev.InstanceLost("b"), [])])
    assert times.sync.sum == 3.0
    assert sum(times.load.counts) == 0, "nobody ordered it: the trainer has brought it"


def test_newer_version_replaces_an_incomplete_rollout() -> None:
    times = WeightTimes()
    tell(times, [joined("a"), (5.0, ev.WeightsPublished(1), []), (6.0, ev.WeightsPublished(2), [])])
    tell(times, [updated(7.0, "a", 1)])
    assert sum(times.sync.counts) == 0
    tell(times, [updated(8.0, "a", 2)])
    assert times.sync.sum == 2.0


def test_restart_rebuilds_the_fleet() -> None:
    times = WeightTimes()
    tell(times, [joined("a"), joined("b"), (5.0, ev.WeightsPublished(1), [])])
    tell(times, [(6.0, ev.Restored(RunState()), []), joined("a"), updated(9.0, "a", 1)])
    assert times.sync.sum == 4.0
