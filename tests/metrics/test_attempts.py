"""Which attempts are in flight: closed by their answers, and by the end of their instance."""

from __future__ import annotations

from typing import Any

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import (
    InstanceJoined,
    InstanceLost,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    WeightsUpdated,
    Woke,
)
from rollout_sched.core.model.records import RunState
from rollout_sched.metrics.attempts import AttemptIndex, AttemptSpan, AttemptSpans, Closed
from rollout_sched.metrics.fold import Folded


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
    assert index.closed.attempt == 1


def test_a_scheduler_takes_its_attempts_with_it() -> None:
    assert index_of(dispatch(1, "i"), dispatch(2, "j"), ev.Restored(RunState())).open == {}


def fold(*entries: tuple[float, Any], end_s: float | None = None) -> list[Closed]:
    closed: list[Closed] = []
    spans = AttemptSpans(closed.append)
    folded = Folded(spans)
    for now, said in entries:
        acted = isinstance(said, Dispatch)
        folded.observe(now, Woke() if acted else said, [said] if acted else [])
    if end_s is not None:
        spans.end(end_s)
    return closed


def test_the_time_of_an_attempt_is_shared_out_by_tokens() -> None:
    [closed] = fold(
        (0.0, InstanceJoined("i", 2, 1000, 3)),
        (1.0, Dispatch("a", 1, "i", 10, 40, 3)),
        (5.0, RequestFinished("a", 1, 40, ((3, 10), (4, 30)))),
    )
    assert closed.spans == (AttemptSpan(1.0, 1.0, 3, 10), AttemptSpan(2.0, 3.0, 4, 30))
    assert (closed.outcome, closed.end_s) == ("finished", 5.0)


def test_without_spans_tokens_belong_to_the_version_at_dispatch() -> None:
    [closed] = fold(
        (0.0, InstanceJoined("i", 2, 1000)),
        (1.0, WeightsUpdated("i", 7)),
        (2.0, Dispatch("a", 1, "i", 10, 40, 7)),
        (3.0, WeightsUpdated("i", 8)),
        (4.0, RequestInterrupted("a", 1, 5)),
    )
    assert closed.spans == (AttemptSpan(2.0, 2.0, 7, 5),)
    assert closed.outcome == "interrupted"


def test_slot_is_the_lowest_free_one() -> None:
    closed = fold(
        (0.0, InstanceJoined("i", 4, 1000)),
        (1.0, Dispatch("a", 1, "i", 10, 40, 0)),
        (1.0, Dispatch("b", 2, "i", 10, 40, 0)),
        (2.0, RequestFinished("a", 1, 5)),
        (3.0, Dispatch("c", 3, "i", 10, 40, 0)),
        end_s=9.0,
    )
    assert [each.attempt.place for each in closed] == [1, 2, 1]
    assert [each.outcome for each in closed] == ["finished", "still running", "still running"]


def test_attempts_of_a_lost_or_restarted_instance_are_lost() -> None:
    closed = fold(
        (0.0, InstanceJoined("i", 4, 1000)),
        (1.0, Dispatch("a", 1, "i", 10, 40, 0)),
        (2.0, InstanceLost("i", "gone")),
        (3.0, InstanceJoined("i", 4, 1000)),
        (4.0, Dispatch("a", 2, "i", 10, 40, 0)),
        (5.0, InstanceJoined("i", 4, 1000)),
        (6.0, RequestFinished("a", 2, 5)),
    )
    assert [(each.outcome, each.reason) for each in closed] == [
        ("lost", "gone"),
        ("lost", "it was restarted"),
    ]


def test_failed_attempt_has_its_reason() -> None:
    [closed] = fold(
        (0.0, InstanceJoined("i", 4, 1000)),
        (1.0, Dispatch("a", 1, "i", 10, 40, 0)),
        (2.0, RequestFailed("a", 1, "500")),
    )
    assert (closed.outcome, closed.reason) == ("failed", "500")
