"""Direct requests: a client waits for each; batches, rounds and staleness do not touch them."""

from __future__ import annotations

import pytest

from rollout_sched.core.actions import Answer, Discard, Dispatch, Interrupt
from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import (
    BatchRequested,
    InstanceJoined,
    InstanceLost,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    RequestWithdrawn,
    SessionEnded,
    TokensArrived,
)
from rollout_sched.core.model import Segment
from tests.core.told import BIG, LIMIT, PROMPT, Told, sent, thrown


def ask(name: str = "d1", group: str = "g", session: str = "") -> RequestSubmitted:
    return RequestSubmitted(name, group, PROMPT, LIMIT, session)


def test_answered_without_a_trainer() -> None:
    told = Told(prompts_per_step=4)
    assert told(ask()) == [sent("d1", 1)]
    (answer,) = told(RequestFinished("d1", 1, 7))
    assert isinstance(answer, Answer)
    assert answer.sample.request == "d1"
    assert answer.sample.segments == (Segment(0, 7, "i0"),)
    assert not told.scheduler.requests
    assert not told.scheduler.siblings


def test_a_batch_leaves_them_alone() -> None:
    told = Told(prompts_per_step=1)
    told.submit("a")
    told(ask(), BatchRequested())
    delivered = told(RequestFinished("a/0", 2, 5))
    assert "d1" in told.scheduler.requests
    assert not any(isinstance(action, Interrupt | Discard) for action in delivered)


def test_hanging_up_frees_the_slot() -> None:
    told = Told(slots=1)
    told(ask("d1"), ask("d2"))
    assert told(RequestWithdrawn("d1")) == [
        Interrupt("d1", 1, "i0"),
        thrown("d1", 0, "withdrawn", ends=True),
    ]
    actions = told(RequestInterrupted("d1", 1, 3))
    assert actions == [thrown("d1", 3, "withdrawn", attempt=1), sent("d2", 2)]


def test_hanging_up_while_waiting() -> None:
    told = Told(slots=1)
    told(ask("d1"), ask("d2"))
    assert told(RequestWithdrawn("d2")) == [thrown("d2", 0, "withdrawn", ends=True)]


def test_hanging_up_twice_is_counted() -> None:
    told = Told()
    told(ask("d1"), RequestWithdrawn("d1"), RequestWithdrawn("d1"))
    assert told.anomalies == {"unknown_request": 1}


def test_a_lost_instance_keeps_what_was_streamed() -> None:
    told = Told(instances=2)
    told(ask(), TokensArrived("d1", 1, 6))
    assert told(InstanceLost("i0")) == [Dispatch("d1", 2, "i1", 16, 94, 0, 6, 16, 0)]


def test_one_that_cannot_be_made_fails_alone() -> None:
    told = Told()
    told(ask("d1"), ask("d2"))
    (gone,) = told(RequestFailed("d1", 1, "400", blame="request"))
    assert gone == thrown("d1", 0, "failed", ends=True)
    assert [request.id for request in told.scheduler.requests] == ["d2"]


def test_siblings_teach_each_other() -> None:
    told = Told(prediction="group_history", routing="least_tokens")
    told(ask("d1"), ask("d2"))
    assert told.request("d2").expected_tokens == LIMIT
    told(RequestFinished("d1", 1, 7))
    assert told.request("d2").expected_tokens == 7


def test_a_session_goes_home() -> None:
    told = Told(instances=3, routing={"use": "session_affinity", "margin": 1})
    told(ask("d1", "g", "talk"), ask("d2"), RequestFinished("d1", 1, 5))
    (dispatch,) = told(ask("d3", "h", "talk"))
    assert isinstance(dispatch, Dispatch)
    assert dispatch.instance == "i0"
    told(SessionEnded("talk"), SessionEnded("talk"))
    assert told.anomalies == {"unknown_session": 1}


def test_one_of_a_session_passes_those_whose_kv_is_nowhere() -> None:
    told = Told(slots=1, admission={"use": "aimd_concurrency", "longest": BIG})
    told(ask("d1", session="talk"), ask("d2"), ask("d3"))
    told(RequestFinished("d1", 1, 5))
    assert told.running == ["d2"]
    assert told(ask("d4", session="talk")) == []
    (_, dispatch) = told(RequestFinished("d2", 2, 5))
    assert isinstance(dispatch, Dispatch)
    assert dispatch.request == "d4"


def test_a_segment_budget_goes_on_at_once() -> None:
    told = Told(interruption={"use": "partial", "segment_tokens": 10})
    told(ask())
    (again,) = told(RequestFinished("d1", 1, 10, reason="length"))
    assert again == Dispatch("d1", 2, "i0", 20, 10, 0, 10, 20, 0)


@pytest.mark.parametrize(
    "event",
    [
        RequestSubmitted("d", "g", 0, 1),
        RequestSubmitted("d", "g", 1, 0),
        RequestSubmitted("d", "g", BIG, 1),
        RequestSubmitted("known", "g", 1, 1),
    ],
)
def test_the_impossible_is_refused(event: RequestSubmitted) -> None:
    told = Told()
    told(ask("known"))
    with pytest.raises(CallerError):
        told(event)
    assert [request.id for request in told.scheduler.requests] == ["known"]


def test_an_instance_that_comes_late_takes_what_waits() -> None:
    told = Told(instances=0)
    assert told(ask()) == []
    assert told(InstanceJoined("i9", 1, BIG, 0)) == [sent("d1", 1, "i9")]
