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
    SubmissionsClosed,
    WeightsPublished,
)
from rollout_sched.core.model.model import GroupState, Request, Segment
from tests.core.told import FULLY_ASYNC, LIMIT, PROMPT, Told, thrown


def launched(samples: int = 2, **roles: object) -> tuple[Told, list[Request]]:
    """A group that is launched, and its requests, all of which run."""
    told = Told(**(FULLY_ASYNC | roles))
    told.submit("a", samples=samples)
    return told, told.scheduler.state.groups["a"].requests


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
