"""Which attempts are in flight: closed by their answers, and by the end of their instance."""

from __future__ import annotations

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.records import RunState
from rollout_sched.metrics import AttemptIndex


def index_of(*entries: object) -> AttemptIndex:
    index = AttemptIndex()
    handlers = index.handlers()
    for now, entry in enumerate(entries):
        handlers[type(entry)](float(now), entry)
    return index


def dispatch(attempt: int, instance: str = "i") -> act.Dispatch:
    return act.Dispatch(f"g/{attempt}", attempt, instance, 10, 100, 0)


def test_an_attempt_is_open_from_its_dispatch_to_its_answer() -> None:
    index = index_of(dispatch(1), dispatch(2), ev.RequestFinished("g/1", 1, 5))
    assert list(index.open) == [2]
    assert index.open[2] == dispatch(2)
    assert index.closed is not None
    assert index.closed.attempt == 1


def test_an_answer_to_no_open_attempt_closes_none() -> None:
    index = index_of(
        dispatch(1), ev.RequestInterrupted("g/1", 1, 5), ev.RequestInterrupted("g/1", 1, 5)
    )
    assert index.closed is None


def test_a_lost_instance_takes_its_attempts_with_it() -> None:
    index = index_of(dispatch(1, "i"), dispatch(2, "j"), ev.InstanceLost("i", "gone"))
    assert list(index.open) == [2]


def test_an_instance_that_joins_anew_has_none_of_its_old_attempts() -> None:
    index = index_of(dispatch(1, "i"), ev.InstanceJoined("i", 8, 1000))
    assert not index.open


def test_a_scheduler_takes_its_attempts_with_it() -> None:
    assert index_of(dispatch(1, "i"), dispatch(2, "j"), ev.Restored(RunState())).open == {}
