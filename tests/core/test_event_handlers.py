"""Events are applied by who says them; what follows is in test_scheduler and the laws."""

from __future__ import annotations

import typing

import pytest

from rollout_sched.core import events as ev
from rollout_sched.core.events import (
    Event,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    RequestSubmitted,
    SubmissionsClosed,
    TokensArrived,
    Woke,
)
from tests.core.told import BIG, LIMIT, PROMPT, Told


def test_every_event_has_its_handler() -> None:
    assert set(Told().scheduler._apply) == set(typing.get_args(Event))


@pytest.mark.parametrize(
    ("event", "asks"),
    [
        (ev.BatchRequested(), True),
        (SubmissionsClosed(), True),
        (ev.GroupSubmitted("a", 1, PROMPT, LIMIT), True),
        (InstanceJoined("i1", 8, BIG), True),
        (InstanceLost("i0"), True),
        (ev.WeightsPublished(1), True),
        (RequestSubmitted("d", "", PROMPT, LIMIT), False),
        (TokensArrived("d0", 1, 3), False),
        (InstanceReported("i0", 1, 0, 0.5), False),
        (Woke(), False),
    ],
)
def test_only_some_make_the_group_level_roles_look_again(event: Event, asks: bool) -> None:
    told = Told()
    told(RequestSubmitted("d0", "", PROMPT, LIMIT))
    assert not told.scheduler.progress.dirty
    told.scheduler._apply[type(event)](event, 0.0)
    assert told.scheduler.progress.dirty is asks


def test_the_last_report_stays_with_its_instance() -> None:
    told = Told()
    assert told.instance("i0").report is None
    report = InstanceReported("i0", 3, 2, 0.75, preemptions=4)
    told(InstanceReported("i0", 1, 0, 0.1), report)
    assert told.instance("i0").report == report
    told(InstanceJoined("i0", 8, BIG))
    assert told.instance("i0").report is None, "it was restarted"
    told(InstanceReported("nobody", 1, 0, 0.1))
    assert told.anomalies == {"unknown_instance": 1}


def test_what_is_known_of_a_prompt_goes_with_its_group() -> None:
    told = Told(prediction="prompt_history")
    told(ev.GroupSubmitted("a@2", 1, PROMPT, LIMIT, "a", (9, 7), 50))
    group = told.scheduler.groups["a@2"]
    assert group.prompt == "a"
    assert group.siblings.history.ascending == [7, 9]
    assert group.siblings.expected_tokens == 50


def test_what_is_known_of_a_prompt_is_not_kept_where_nobody_asks() -> None:
    told = Told()
    told(ev.GroupSubmitted("a", 1, PROMPT, LIMIT, "a", (9, 7)))
    assert told.scheduler.groups["a"].siblings.history is None
