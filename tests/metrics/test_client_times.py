"""What clients wait for, and that nothing of it is kept."""

from __future__ import annotations

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.records import RunState
from rollout_sched.metrics.live import ClientTimes
from tests.metrics.told import Entry, sample, tell


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


def test_who_leaves_or_fails_is_no_duration_and_is_forgotten() -> None:
    times = ClientTimes()
    gone = [act.Discard("r", 0, "withdrawn", ends=True), act.Discard("s", 4, "failed", ends=True)]
    tell(times, [asked(1.0, "r"), asked(1.0, "s", sent("s")), (2.0, ev.Woke(), list(gone))])
    assert sum(times.duration.counts) == 0
    assert kept(times) == 0


def test_what_an_earlier_scheduler_had_is_forgotten() -> None:
    times = ClientTimes()
    tell(times, [asked(1.0, "r"), asked(1.0, "s", sent("s")), (2.0, ev.Restored(RunState()), [])])
    assert kept(times) == 0


def test_what_belongs_to_a_group_is_not_a_client_s() -> None:
    times = ClientTimes()
    dispatch = act.Dispatch("g/0", 1, "a", 3, 9, 0, group="g")
    tell(times, [(0.0, ev.GroupSubmitted("g", 1, 3, 9), [dispatch])])
    assert sum(times.wait.counts) == 0
    assert kept(times) == 0
