"""Outcomes: what becomes of groups and requests, one law each; the whole is in test_scheduler."""

from __future__ import annotations

from rollout_sched.core.model.actions import Answer
from rollout_sched.core.model.events import RequestSubmitted
from rollout_sched.core.model.model import GroupState, Request, RequestState, Segment
from tests.core.told import FULLY_ASYNC, LIMIT, PROMPT, Told, thrown


def launched(samples: int = 2, **roles: object) -> tuple[Told, list[Request]]:
    """A group that is launched, and its requests, all of which run."""
    told = Told(**(FULLY_ASYNC | roles))
    told.submit("a", samples=samples)
    return told, told.scheduler.books.groups["a"].requests


def test_a_group_is_full_with_the_last_sample_it_needs() -> None:
    told, (first, second) = launched()
    outcomes, group = told.scheduler.work.outcomes, told.scheduler.books.groups["a"]
    for request in (first, second):
        assert group.state is GroupState.ACTIVE
        request.attempt = None
        outcomes.finish(request, "stop")
    assert group.state is GroupState.COMPLETE
    assert told.scheduler.books.progress.dirty


def test_a_group_fails_with_one_of_its_requests() -> None:
    told, (first, _) = launched()
    told.scheduler.work.outcomes.give_up(first)
    assert "a" not in told.scheduler.books.groups
    assert len(told.scheduler.work.requests) == 0


def test_a_direct_request_ends_alone() -> None:
    told = Told()
    told(RequestSubmitted("d1", "p", PROMPT, LIMIT), RequestSubmitted("d2", "p", PROMPT, LIMIT))
    told.scheduler.work.outcomes.give_up(told.request("d1"))
    assert [request.id for request in told.scheduler.work.requests] == ["d2"]
    assert told.scheduler._out[-1] == thrown("d1", 0, "failed", ends=True)


def test_a_direct_request_is_answered_when_it_is_finished() -> None:
    told = Told()
    told(RequestSubmitted("d", "p", PROMPT, LIMIT))
    request = told.request("d")
    request.attempt = None
    request.segments, request.response_tokens = (Segment(0, 3, "i0"),), 3
    told.scheduler.work.outcomes.finish(request, "stop")
    (answer,) = told.scheduler._out
    assert isinstance(answer, Answer)
    assert (answer.sample.request, answer.sample.response_tokens) == ("d", 3)
    assert len(told.scheduler.books.siblings) == 0


def test_who_rests_is_parked_though_its_group_is_active() -> None:
    told, (first, _) = launched()
    first.attempt = None
    first.rests_until = 9.0
    told.scheduler.work.outcomes.go_on(first)
    assert first.state is RequestState.PARKED


def test_a_sample_is_as_stale_as_its_oldest_segment() -> None:
    told, (first, _) = launched()
    first.segments = (Segment(3, 1, "i0"), Segment(2, 1, "i1"))
    told.scheduler.books.progress.version = 5
    assert told.scheduler.work.finished.of(first).staleness == 3
    first.segments = ()
    assert told.scheduler.work.finished.of(first).staleness == 0
