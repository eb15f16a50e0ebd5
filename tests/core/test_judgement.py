"""Groups that are judged once they are whole: kept, filtered, failed, or asked about again."""

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
from rollout_sched.core.model.model import GroupState
from tests.core.told import LIMIT, PROMPT, Told, thrown


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
        assert isinstance(asked, Judge)
        assert [(s.request, s.response_tokens) for s in asked.samples] == [("a/1", 7), ("a/0", 5)]
        assert told.scheduler.view.is_judged("a", asked.judgement)
        assert not told.running, "it holds no slot"

    def test_one_that_is_not_to_be_judged_goes_at_once(self) -> None:
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
        assert sample is not None
        assert (sample.group, sample.index, sample.response_tokens) == ("a", 1, 7)
        assert view.to_judge("a/0") is view.to_judge("b/0") is view.to_judge("nobody") is None


class TestAnswers:
    def test_what_is_kept_goes_to_the_trainer(self) -> None:
        told = Told()
        told(BatchRequested(), *judged("a"))
        asked = whole(told)
        (delivered,) = told(GroupJudged("a", asked.judgement, "kept"))
        assert isinstance(delivered, Deliver)
        assert delivered.samples == asked.samples

    @pytest.mark.parametrize("verdict", ["filtered", "failed"])
    def test_what_is_not_is_thrown_away_and_made_up_for(
        self, verdict: Literal["filtered", "failed"]
    ) -> None:
        told = Told()
        told(BatchRequested(), *judged("a", "b", "c"))
        assert told.running == ["a/0"]
        asked = whole(told)
        lost, *_ = told(GroupJudged("a", asked.judgement, verdict))
        assert lost == thrown("a/0", 7, verdict, ends=True)
        assert told.running == ["b/0"], "by exactly one more"
        assert "a" not in told.scheduler.books.groups

    def test_an_answer_to_an_earlier_question_is_none(self) -> None:
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

    def test_nobody_can_judge_a_group_that_is_not_whole(self) -> None:
        told = Told()
        told(BatchRequested(), *judged("a"))
        assert not told(GroupJudged("a", 0, "failed"))
        assert told.running == ["a/0"]


class TestAge:
    def test_one_that_grows_too_old_meanwhile_starts_over_and_is_judged_anew(self) -> None:
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

    def test_a_round_leaves_it_as_it_leaves_what_is_whole(self) -> None:
        told = Told(batching={"use": "sync", "over_prompts": 2.0}, freshness="unbounded")
        told(*judged("a", "b"), BatchRequested())
        asked = whole(told)
        other = whole(told, "b", 2)
        told(GroupJudged("b", other.judgement, "kept"))
        assert told.scheduler.books.groups["a"].state is GroupState.JUDGING
        told(GroupJudged("a", asked.judgement, "kept"))
        (delivered,) = told(BatchRequested())
        assert isinstance(delivered, Deliver)
        assert delivered.samples[0].group == "a"


def test_the_last_batch_is_short_and_says_so() -> None:
    told = Told(2)
    told(BatchRequested(), *judged("a", "b"), SubmissionsClosed())
    first = whole(told)
    second = whole(told, "b", 2)
    told(GroupJudged("a", first.judgement, "filtered"))
    (delivered,) = told(GroupJudged("b", second.judgement, "kept"))
    assert isinstance(delivered, Deliver)
    assert (len(delivered.samples), delivered.last, delivered.missing) == (1, True, 1)


def test_a_whole_batch_misses_nothing() -> None:
    told = Told(batching={"use": "sync", "part_prompts": 1}, prompts_per_step=2)
    told(BatchRequested(parts=True), *judged("a", "b"))
    first, second = whole(told), whole(told, "b", 2)
    (part,) = told(GroupJudged("a", first.judgement, "kept"))
    (last,) = told(GroupJudged("b", second.judgement, "kept"))
    assert isinstance(part, Deliver)
    assert isinstance(last, Deliver)
    assert (part.last, part.missing, last.last, last.missing) == (False, 0, True, 0)


def test_who_finishes_too_late_for_its_round_is_judged_all_the_same() -> None:
    told = Told(
        batching={"use": "sync", "over_prompts": 2.0},
        interruption={"use": "partial", "at_update": "in_place"},
        freshness="unbounded",
    )
    told(*judged("a", "b"), BatchRequested())
    other = whole(told, "b", 2)
    told(GroupJudged("b", other.judgement, "kept"))
    assert told.scheduler.books.groups["a"].state is GroupState.DEFERRED
    asked = whole(told)
    assert told.scheduler.books.groups["a"].state is GroupState.JUDGING
    assert not [a for a in told(GroupJudged("a", asked.judgement, "kept")) if type(a) is Discard]
    assert told.scheduler.books.groups["a"].state is GroupState.COMPLETE
