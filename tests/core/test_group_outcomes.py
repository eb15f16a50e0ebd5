"""What becomes of groups, one law each; the whole is in test_scheduler."""

from __future__ import annotations

from rollout_sched.core.model.model import GroupState, Request, RequestState, Segment
from rollout_sched.core.state.lifecycle import FINISH, move
from tests.core.told import FULLY_ASYNC, Told, thrown


def launched(samples: int = 2, **roles: object) -> tuple[Told, list[Request]]:
    """A group that is launched, and its requests, all of which run."""
    told = Told(**(FULLY_ASYNC | roles))
    told.submit("a", samples=samples)
    return told, told.scheduler.books.groups["a"].requests


def test_a_set_back_group_waits_in_the_line_of_the_deferred() -> None:
    told, requests = launched(interruption="partial")
    told.scheduler.work.group_outcomes.set_back(told.scheduler.books.groups["a"])
    assert told.scheduler.books.groups["a"].state is GroupState.DEFERRED
    assert [request.state for request in requests] == [RequestState.INTERRUPTING] * 2


def test_what_was_finished_starts_over_too() -> None:
    told, (first, second) = launched()
    first.attempt = None
    move(first, FINISH)
    told.scheduler.books.groups["a"].finished.append(first)
    told.scheduler.work.group_outcomes.start_over(told.scheduler.books.groups["a"])
    assert [first.state, second.state] == [RequestState.PARKED] * 2
    assert not told.scheduler.books.groups["a"].finished


def test_a_group_that_fails_ends_all_of_its_requests() -> None:
    told, _ = launched()
    told.scheduler.work.group_outcomes.lose(told.scheduler.books.groups["a"], "failed")
    assert "a" not in told.scheduler.books.groups
    assert len(told.scheduler.work.requests) == 0
    ended = [
        action for action in told.scheduler._out if action == thrown("a/0", 0, "failed", ends=True)
    ]
    assert ended


def test_what_is_too_old_starts_over_and_what_is_not_stays() -> None:
    told, (first, second) = launched(freshness={"use": "bounded", "max_staleness": 1})
    for request in (first, second):
        request.segments, request.response_tokens = (Segment(0, 3, "i0"),), 3
    group = told.scheduler.books.groups["a"]
    told.scheduler.books.sample_buffer.note_version(group, 0)
    told.scheduler.books.progress.version = 1
    told.scheduler.work.group_outcomes.check_age(group)
    assert group.state is GroupState.ACTIVE
    told.scheduler.books.progress.version = 2
    told.scheduler.work.group_outcomes.check_age(group)
    assert group.state is GroupState.DEFERRED
    assert first.response_tokens == second.response_tokens == 0
