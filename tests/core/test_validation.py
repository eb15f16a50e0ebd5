"""What a caller may not ask is refused before anything is applied; see also TestCallerErrors."""

from __future__ import annotations

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.events import (
    BatchRequested,
    Event,
    GroupSubmitted,
    InstanceJoined,
    RequestFinished,
    RequestSubmitted,
    SubmissionsClosed,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.core.validation import CHECKS
from tests.core.told import BIG, LIMIT, PROMPT, Told

REFUSED: list[tuple[Event, str]] = [
    (GroupSubmitted("a", 1, PROMPT, LIMIT), "group 'a' is already here"),
    (GroupSubmitted("late", 1, PROMPT, LIMIT), "after submissions were closed"),
    (GroupSubmitted("none", 0, PROMPT, LIMIT), "must be at least 1"),
    (GroupSubmitted("past", 1, PROMPT, LIMIT, "p", (7, -1)), "history and expected_tokens cannot"),
    (GroupSubmitted("idea", 1, PROMPT, LIMIT, expected_tokens=-1), "leave out what is not known"),
    (RequestSubmitted("d", "", PROMPT, LIMIT), "request 'd' is already here"),
    (RequestSubmitted("large", "", BIG, 1), f"is {BIG + 1}, but no instance takes"),
    (InstanceJoined("i1", 0, 1), "slots and kv_tokens"),
    (InstanceJoined("i1", 1, BIG, 7), "but the trainer is at 0"),
    (WeightsPublished(0), "version 0 is not after 0"),
]


@pytest.mark.parametrize(("event", "text"), REFUSED)
def test_invalid_event_is_refused_with_a_reason(event: Event, text: str) -> None:
    told = Told()
    told.submit("a")
    told(RequestSubmitted("d", "", PROMPT, LIMIT), SubmissionsClosed())
    with pytest.raises(CallerError, match=text):
        CHECKS[type(event)](told.scheduler.parts, event)


def test_how_to_load_the_newest_may_be_said_once() -> None:
    """The trainer has brought it to some instances itself."""
    told = Told()
    told(WeightsPublished(1, loads=False))
    told(WeightsPublished(1))
    with pytest.raises(CallerError, match="versions must increase"):
        told(WeightsPublished(1))


def test_weights_loaded_by_the_trainer_are_never_refused() -> None:
    """Its own weights are on the instances, whatever else is under way."""
    told = Told(2, batching={"use": "fully_async", "part_prompts": 1}, freshness="unbounded")
    told.submit("a", "b")
    told(BatchRequested(parts=True), RequestFinished("a/0", 1, 5))
    assert told.scheduler.state.progress.in_batch == 1
    with pytest.raises(CallerError, match="in part"):
        told(WeightsPublished(1))
    told(WeightsPublished(1, loads=False))
    assert told.scheduler.state.progress.version == 1


def test_older_instance_is_refused_when_the_trainer_loads() -> None:
    told = Told(1, freshness={"use": "bounded", "max_staleness": 0})
    told(WeightsPublished(1, loads=False), WeightsUpdated("i0", 1))
    told.submit("a", samples=2)
    with pytest.raises(CallerError, match="the trainer brings 1 to the instances itself"):
        told(InstanceJoined("late", 8, 1000, 0))
    assert told.scheduler.view.instance("late") is None
    told(InstanceJoined("late", 8, 1000, 1))
