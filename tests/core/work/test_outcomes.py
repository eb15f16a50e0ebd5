"""Outcomes: what becomes of groups and requests, one law each; the whole is in test_scheduler."""

from __future__ import annotations

from typing import Literal

import pytest

from rollout_sched.core.model.actions import Deliver, Discard, Judge
from rollout_sched.core.model.events import (
    BatchRequested,
    GroupJudged,
    GroupSubmitted,
    RequestFinished,
    RequestSubmitted,
    SubmissionsClosed,
    WeightsPublished,
)
from rollout_sched.core.model.model import GroupState, Request, RequestState, Segment
from rollout_sched.core.state.lifecycle import FINISH, move
from tests.core.told import FULLY_ASYNC, LIMIT, PROMPT, Told, thrown


def launched(samples: int = 2, **roles: object) -> tuple[Told, list[Request]]:
    """A group that is launched, and its requests, all of which run."""
    told = Told(**(FULLY_ASYNC | roles))
    told.submit("a", samples=samples)
    return told, told.scheduler.state.groups["a"].requests


def test_a_group_is_full_with_the_last_sample_it_needs() -> None:
    told, (first, second) = launched()
    outcomes, group = told.scheduler.parts.outcomes, told.scheduler.state.groups["a"]
    for request in (first, second):
        assert group.state is GroupState.ACTIVE
        request.attempt = None
        outcomes.finish(request, "stop")
    assert group.state is GroupState.COMPLETE
    assert told.scheduler.state.progress.must_decide


def test_a_group_fails_with_one_of_its_requests() -> None:
    told, (first, _) = launched()
    told.scheduler.parts.outcomes.give_up(first)
    assert "a" not in told.scheduler.state.groups
    assert len(told.scheduler.parts.requests) == 0


def test_a_direct_request_ends_alone() -> None:
    told = Told()
    told(RequestSubmitted("d1", "p", PROMPT, LIMIT), RequestSubmitted("d2", "p", PROMPT, LIMIT))
    told.scheduler.parts.outcomes.give_up(told.request("d1"))
    assert [request.id for request in told.scheduler.parts.requests] == ["d2"]
    assert told.scheduler.state.orders[-1] == thrown("d1", 0, "failed", ends=True)


def test_a_direct_request_is_answered_when_it_is_finished() -> None:
    told = Told()
    told(RequestSubmitted("d", "p", PROMPT, LIMIT))
    request = told.request("d")
    request.attempt = None
    request.segments, request.response_tokens = (Segment(0, 3, "i0"),), 3
    told.scheduler.parts.outcomes.finish(request, "stop")
    (answer,) = told.scheduler.state.orders
    assert (answer.sample.request, answer.sample.response_tokens) == ("d", 3)
    assert len(told.scheduler.state.siblings) == 0


def test_resting_request_of_an_active_group_is_parked() -> None:
    told, (first, _) = launched()
    first.attempt = None
    first.rests_until = 9.0
    told.scheduler.parts.outcomes.requeue(first)
    assert first.state is RequestState.PARKED


def test_a_sample_is_as_stale_as_its_oldest_segment() -> None:
    told, (first, _) = launched()
    first.segments = (Segment(3, 1, "i0"), Segment(2, 1, "i1"))
    told.scheduler.state.progress.version = 5
    assert told.scheduler.parts.finished.sample_of(first).staleness == 3
    first.segments = ()
    assert told.scheduler.parts.finished.sample_of(first).staleness == 0


def test_a_set_back_group_waits_in_the_line_of_the_deferred() -> None:
    told, requests = launched(interruption="partial")
    told.scheduler.parts.group_outcomes.set_back(told.scheduler.state.groups["a"])
    assert told.scheduler.state.groups["a"].state is GroupState.DEFERRED
    assert [request.state for request in requests] == [RequestState.INTERRUPTING] * 2


def test_finished_request_starts_over() -> None:
    told, (first, second) = launched()
    first.attempt = None
    move(first, FINISH)
    told.scheduler.state.groups["a"].finished.append(first)
    told.scheduler.parts.group_outcomes.start_over(told.scheduler.state.groups["a"])
    assert [first.state, second.state] == [RequestState.PARKED] * 2
    assert not told.scheduler.state.groups["a"].finished


def test_a_group_that_fails_ends_all_of_its_requests() -> None:
    told, _ = launched()
    told.scheduler.parts.group_outcomes.lose(told.scheduler.state.groups["a"], "failed")
    assert "a" not in told.scheduler.state.groups
    assert len(told.scheduler.parts.requests) == 0
    ended = [
        action
        for action in told.scheduler.state.orders
        if action == thrown("a/0", 0, "failed", ends=True)
    ]
    assert ended


def test_stale_group_starts_over_and_fresh_group_stays() -> None:
    told, (first, second) = launched(freshness={"use": "bounded", "max_staleness": 1})
    for request in (first, second):
        request.segments, request.response_tokens = (Segment(0, 3, "i0"),), 3
    group = told.scheduler.state.groups["a"]
    told.scheduler.state.sample_buffer.note_version(group, 0)
    told.scheduler.state.progress.version = 1
    told.scheduler.parts.group_outcomes.check_age(group)
    assert group.state is GroupState.ACTIVE
    told.scheduler.state.progress.version = 2
    told.scheduler.parts.group_outcomes.check_age(group)
    assert group.state is GroupState.DEFERRED
    assert first.response_tokens == second.response_tokens == 0


def finished(**roles: object) -> Told:
    """Group a, of which one sample of two has finished under version 0."""
    told = Told(batching="fully_async", **roles)
    told(BatchRequested(), GroupSubmitted("a", 2, PROMPT, LIMIT, judged=True))
    told(RequestFinished("a/0", 1, 7))
    return told


def test_a_sample_is_as_old_as_the_trainer_has_come() -> None:
    told = finished(freshness="unbounded")
    first = told.request("a/0")
    assert told.scheduler.parts.finished.sample_of(first).staleness == 0
    told(WeightsPublished(2))
    assert told.scheduler.parts.finished.sample_of(first).staleness == 2


def test_stale_tokens_are_masked() -> None:
    told = finished(freshness={"max_staleness": 1, "when_stale": "mask"})
    told(WeightsPublished(2))
    sample = told.scheduler.parts.finished.sample_of(told.request("a/0"))
    assert (sample.masked_tokens, sample.staleness) == (7, 0)
    assert [segment.masked for segment in sample.segments] == [True]


def test_each_question_has_a_number_of_its_own() -> None:
    told = finished(freshness="unbounded")
    (asked,) = (a for a in told(RequestFinished("a/1", 2, 3)) if isinstance(a, Judge))
    group = told.scheduler.state.groups["a"]
    assert group.judgement == asked.judgement > 0
    told.scheduler.parts.finished.judge(group)
    assert group.judgement > asked.judgement


def judged(*groups: str, samples: int = 1) -> list[GroupSubmitted]:
    return [GroupSubmitted(group, samples, PROMPT, LIMIT, judged=True) for group in groups]


def whole(told: Told, group: str = "a", attempt: int = 1) -> Judge:
    """The group's only sample has finished: what is asked."""
    (asked,) = told(RequestFinished(f"{group}/0", attempt, 7))
    assert isinstance(asked, Judge)
    return asked


class TestAsking:
    def test_a_group_is_judged_when_it_is_whole(self) -> None:
        told = Told()
        told(BatchRequested(), *judged("a", samples=2))
        assert not told(RequestFinished("a/1", 2, 7))
        (asked,) = told(RequestFinished("a/0", 1, 5))
        assert [(s.request, s.response_tokens) for s in asked.samples] == [("a/1", 7), ("a/0", 5)]
        assert told.scheduler.view.is_judged("a", asked.judgement)
        assert not told.running, "it holds no slot"

    def test_unjudged_group_is_delivered_at_once(self) -> None:
        told = Told()
        told(BatchRequested())
        told.submit("a")
        (delivered,) = told(RequestFinished("a/0", 1, 7))
        assert isinstance(delivered, Deliver)

    def test_a_finished_sample_may_be_judged_before_its_group_is_whole(self) -> None:
        told = Told()
        told(BatchRequested(), *judged("a", samples=2))
        told.submit("b")
        told(RequestFinished("a/1", 2, 7))
        view = told.scheduler.view
        sample = view.to_judge("a/1")
        assert (sample.group, sample.index, sample.response_tokens) == ("a", 1, 7)
        assert view.to_judge("a/0") is view.to_judge("b/0") is view.to_judge("nobody") is None


class TestAnswers:
    def test_kept_group_is_delivered(self) -> None:
        told = Told()
        told(BatchRequested(), *judged("a"))
        asked = whole(told)
        (delivered,) = told(GroupJudged("a", asked.judgement, "kept"))
        assert delivered.samples == asked.samples

    @pytest.mark.parametrize("verdict", ["filtered", "failed"])
    def test_rejected_group_is_discarded_and_replaced(
        self, verdict: Literal["filtered", "failed"]
    ) -> None:
        told = Told()
        told(BatchRequested(), *judged("a", "b", "c"))
        assert told.running == ["a/0"]
        asked = whole(told)
        lost, *_ = told(GroupJudged("a", asked.judgement, verdict))
        assert lost == thrown("a/0", 7, verdict, ends=True)
        assert told.running == ["b/0"], "by exactly one more"
        assert "a" not in told.scheduler.state.groups

    def test_answer_to_an_earlier_judgement_is_ignored(self) -> None:
        told = Told()
        told(BatchRequested(), *judged("a"))
        asked = whole(told)
        assert not told(GroupJudged("a", asked.judgement - 1, "kept"))
        assert not told(GroupJudged("a", 0, "failed"))
        assert not told(GroupJudged("b", asked.judgement, "kept"))
        assert told.anomalies == {"unknown_judgement": 3}
        told(GroupJudged("a", asked.judgement, "kept"))
        assert not told(GroupJudged("a", asked.judgement, "failed"))
        assert told.anomalies == {"unknown_judgement": 4}

    def test_judgement_of_an_incomplete_group_is_ignored(self) -> None:
        told = Told()
        told(BatchRequested(), *judged("a"))
        assert not told(GroupJudged("a", 0, "failed"))
        assert told.running == ["a/0"]


class TestAge:
    def test_group_going_stale_starts_over_and_is_judged_again(self) -> None:
        told = Told(batching="fully_async", freshness={"max_staleness": 0, "when_stale": "drop"})
        told(*judged("a"))
        asked = whole(told)
        actions = told(WeightsPublished(1))
        assert thrown("a/0", 7, "stale") in actions
        assert not told.scheduler.view.is_judged("a", asked.judgement)
        assert not any(
            isinstance(action, Deliver)
            for action in told(GroupJudged("a", asked.judgement, "kept"))
        )
        assert told.anomalies == {"unknown_judgement": 1}

    def test_a_round_treats_judged_groups_as_complete(self) -> None:
        told = Told(batching={"use": "sync", "over_prompts": 2.0}, freshness="unbounded")
        told(*judged("a", "b"), BatchRequested())
        asked = whole(told)
        other = whole(told, "b", 2)
        told(GroupJudged("b", other.judgement, "kept"))
        assert told.scheduler.state.groups["a"].state is GroupState.JUDGING
        told(GroupJudged("a", asked.judgement, "kept"))
        (delivered,) = told(BatchRequested())
        assert delivered.samples[0].group == "a"


def test_the_last_batch_is_short_and_says_so() -> None:
    told = Told(2)
    told(BatchRequested(), *judged("a", "b"), SubmissionsClosed())
    first = whole(told)
    second = whole(told, "b", 2)
    told(GroupJudged("a", first.judgement, "filtered"))
    (delivered,) = told(GroupJudged("b", second.judgement, "kept"))
    assert (len(delivered.samples), delivered.last, delivered.missing) == (1, True, 1)


def test_a_whole_batch_misses_nothing() -> None:
    told = Told(batching={"use": "sync", "part_prompts": 1}, prompts_per_step=2)
    told(BatchRequested(parts=True), *judged("a", "b"))
    first, second = whole(told), whole(told, "b", 2)
    (part,) = told(GroupJudged("a", first.judgement, "kept"))
    (last,) = told(GroupJudged("b", second.judgement, "kept"))
    assert (part.last, part.missing, last.last, last.missing) == (False, 0, True, 0)


def test_group_finishing_after_its_round_is_judged() -> None:
    told = Told(
        batching={"use": "sync", "over_prompts": 2.0},
        interruption={"use": "partial", "at_update": "in_place"},
        freshness="unbounded",
    )
    told(*judged("a", "b"), BatchRequested())
    other = whole(told, "b", 2)
    told(GroupJudged("b", other.judgement, "kept"))
    assert told.scheduler.state.groups["a"].state is GroupState.DEFERRED
    asked = whole(told)
    assert told.scheduler.state.groups["a"].state is GroupState.JUDGING
    assert not [a for a in told(GroupJudged("a", asked.judgement, "kept")) if type(a) is Discard]
    assert told.scheduler.state.groups["a"].state is GroupState.COMPLETE
