"""Finished requests as they are handed out: how old they are is told when they go."""

from __future__ import annotations

from rollout_sched.core.model.actions import Judge
from rollout_sched.core.model.events import (
    BatchRequested,
    GroupSubmitted,
    RequestFinished,
    WeightsPublished,
)
from tests.core.told import LIMIT, PROMPT, Told


def finished(**roles: object) -> Told:
    """Group a, of which one sample of two has finished under version 0."""
    told = Told(batching="fully_async", **roles)
    told(BatchRequested(), GroupSubmitted("a", 2, PROMPT, LIMIT, judged=True))
    told(RequestFinished("a/0", 1, 7))
    return told


def test_a_sample_is_as_old_as_the_trainer_has_come() -> None:
    told = finished(freshness="unbounded")
    first = told.request("a/0")
    assert told.scheduler.work.finished.of(first).staleness == 0
    told(WeightsPublished(2))
    assert told.scheduler.work.finished.of(first).staleness == 2


def test_what_is_too_old_of_it_is_masked() -> None:
    told = finished(freshness={"max_staleness": 1, "when_stale": "mask"})
    told(WeightsPublished(2))
    sample = told.scheduler.work.finished.of(told.request("a/0"))
    assert (sample.masked_tokens, sample.staleness) == (7, 0)
    assert [segment.masked for segment in sample.segments] == [True]


def test_each_question_has_a_number_of_its_own() -> None:
    told = finished(freshness="unbounded")
    (asked,) = (a for a in told(RequestFinished("a/1", 2, 3)) if isinstance(a, Judge))
    group = told.scheduler.books.groups["a"]
    assert group.judgement == asked.judgement > 0
    told.scheduler.work.finished.judge(group)
    assert group.judgement > asked.judgement
