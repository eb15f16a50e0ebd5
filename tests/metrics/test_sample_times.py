"""How long groups wait and samples take, and that nothing of it is kept."""

from __future__ import annotations

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.records import RunState
from rollout_sched.metrics.live import SampleTimes
from tests.metrics.told import Entry, sample, tell


def submitted(now: float, group: str, *actions: act.Action) -> Entry:
    return now, ev.GroupSubmitted(group, 2, 3, 9), list(actions)


def sent(group: str, index: int, attempt: int) -> act.Dispatch:
    return act.Dispatch(f"{group}/{index}", attempt, "a", 3, 9, 0, group=group, index=index)


def kept(times: SampleTimes) -> int:
    return len(times._waiting) + len(times._under_way) + len(times._started)


def test_a_group_from_its_submission_to_its_delivery() -> None:
    times = SampleTimes()
    tell(
        times,
        [
            submitted(1.0, "g"),
            (4.0, ev.BatchRequested(), [sent("g", 0, 1)]),
            (6.0, ev.Woke(), [sent("g", 1, 2)]),
            (7.0, ev.RequestInterrupted("g/0", 1, 3), []),
            (8.0, ev.Woke(), [sent("g", 0, 3)]),
            (9.0, ev.RequestFinished("g/1", 2, 5), []),
        ],
    )
    assert (times.wait.sum, sum(times.wait.counts)) == (3.0, 1)
    assert times.oldest_s(14.0) == 10.0
    samples = (sample("g/0", group="g"), sample("g/1", group="g"))
    tell(times, [(14.0, ev.TrajectoryEnded("g/0", 3), [act.Deliver(0, 0, samples)])])
    assert times.duration.sum == (9.0 - 6.0) + (14.0 - 4.0)
    assert times.oldest_s(20.0) == 0.0
    assert kept(times) == 0


def test_the_oldest_is_who_was_begun_first() -> None:
    times = SampleTimes()
    tell(times, [submitted(0.0, "g", sent("g", 0, 1)), submitted(2.0, "h", sent("h", 0, 2))])
    assert times.oldest_s(5.0) == 5.0
    tell(times, [(5.0, ev.Woke(), [act.Deliver(0, 0, (sample("g/0", group="g"),))])])
    assert times.oldest_s(5.0) == 3.0


def test_a_surplus_sample_ends_alone_a_failed_one_ends_its_group() -> None:
    times = SampleTimes()
    begun = [sent("g", 0, 1), sent("g", 1, 2)]
    tell(times, [submitted(0.0, "g", *begun), submitted(0.0, "h"), submitted(0.0, "i")])

    def thrown(group: str, index: int, reason: str) -> Entry:
        discard = act.Discard(f"{group}/{index}", 2, reason, ends=True, group=group, index=index)
        return 3.0, ev.Woke(), [discard]

    tell(times, [thrown("g", 1, "surplus")])
    assert times.oldest_s(3.0) == 3.0
    tell(times, [thrown("g", 0, "failed"), thrown("h", 0, "oversized")])
    assert times.oldest_s(3.0) == 0.0
    assert kept(times) == 1, "one still waits"
    tell(times, [(4.0, ev.Restored(RunState()), [])])
    assert kept(times) == 0
