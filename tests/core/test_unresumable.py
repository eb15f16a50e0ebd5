"""A request whose response cannot be resumed: it is cut only where that cannot be avoided, and then
starts over."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.model.actions import Interrupt, Pause, UpdateWeights, Wake
from rollout_sched.core.model.events import (
    BatchRequested,
    GroupSubmitted,
    InstanceLost,
    InstancePaused,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    TokensArrived,
    WeightsPublished,
    WeightsUpdated,
    Woke,
)
from rollout_sched.core.model.model import RequestState
from rollout_sched.core.restart.facts import state_of
from tests.core.told import FULLY_ASYNC, LIMIT, PROMPT, Told, resumed, sent, tail, thrown

CHUNKS = {"use": "partial", "at_update": "resubmit", "segment_tokens": 8, "segment": "chunk"}


def submitted(*, unresumable: str = "finish", instances: int = 2, **other: Any) -> Told:
    """A scheduler with the group a, which cannot be resumed."""
    told = Told(
        instances=instances,
        interruption={**CHUNKS, "unresumable": unresumable},
        **{**FULLY_ASYNC, **other},
    )
    assert told(GroupSubmitted("a", 1, PROMPT, LIMIT, resumable=False)) == [sent("a/0", 1)]
    return told


def test_an_attempt_has_no_limit_but_the_responses() -> None:
    told = submitted(instances=1)
    assert told.submit("b") == [sent("b/0", 2, max_new_tokens=8)]


@pytest.mark.parametrize(
    "cut",
    [
        RequestInterrupted("a/0", 1, 7),
        RequestFailed("a/0", 1, "reset by peer"),
        InstanceLost("i0"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_the_tokens_of_a_cut_attempt_are_thrown_away(cut: Any) -> None:
    told = submitted()
    told(TokensArrived("a/0", 1, 7))
    discard, *_ = told(cut)
    assert discard == thrown("a/0", 7, "not_resumable", attempt=1)
    assert told.request("a/0").response_tokens == 0
    assert told.request("a/0").context_tokens == PROMPT


def test_a_finished_attempt_keeps_its_tokens() -> None:
    told = submitted()
    told(RequestFinished("a/0", 1, 9))
    assert told.request("a/0").response_tokens == 9


def test_an_update_waits_for_it_and_interrupts_the_others() -> None:
    told = submitted(instances=1)
    told.submit("b")
    assert told(WeightsPublished(1)) == [Interrupt("b/0", 2, "i0")]
    assert told(RequestInterrupted("b/0", 2, 3)) == []
    assert told(RequestFinished("a/0", 1, 50)) == [UpdateWeights("i0", 1)]
    assert told(WeightsUpdated("i0", 1)) == [
        resumed("b/0", 3, made=3, salt=1, max_new_tokens=8),
    ]


def test_an_update_starts_it_over_if_the_policy_says_so() -> None:
    told = submitted(unresumable="start_over", instances=1)
    assert told(WeightsPublished(1)) == [Pause("i0", "abort", clear_cache=True)]
    assert told(RequestInterrupted("a/0", 1, 7)) == [thrown("a/0", 7, "not_resumable", attempt=1)]
    assert told(InstancePaused("i0")) == [UpdateWeights("i0", 1)]
    *_, again = told(WeightsUpdated("i0", 1))
    assert again == sent("a/0", 2, salt=1)


def test_an_answer_may_show_that_a_response_cannot_be_resumed() -> None:
    """All that it has is thrown away, not only what the last attempt made."""
    told = Told(instances=1, interruption=CHUNKS, **FULLY_ASYNC)
    told(RequestSubmitted("r", "r", PROMPT, LIMIT))
    told(RequestFinished("r", 1, 8, reason="length"))
    assert told(RequestInterrupted("r", 2, 5, resumable=False)) == [
        Wake(1.0),
        thrown("r", 13, "not_resumable"),
    ]
    told.seconds = 1.0
    assert told(Woke()) == [sent("r", 3)]


def test_a_restart_keeps_no_tokens_of_it() -> None:
    told = submitted()
    told(TokensArrived("a/0", 1, 7))
    (group,) = state_of(told.scheduler, 0.0).groups
    assert not group.resumable
    assert group.requests[0].segments == ()


def test_a_segment_may_end_before_its_last_tokens() -> None:
    """They are a part of a character: the response goes on before it, and has not ended."""
    told = Told(instances=1, interruption=CHUNKS, **FULLY_ASYNC)
    told(RequestSubmitted("r", "r", PROMPT, LIMIT))
    ended = RequestFinished("r", 1, 6, reason="segment")
    assert told(ended) == [resumed("r", 2, made=6, max_new_tokens=8)]


def test_it_runs_on_when_its_round_ends() -> None:
    told = Told(batching=tail(2.0, 1.0), freshness="unbounded", interruption=CHUNKS)
    told(GroupSubmitted("a", 1, PROMPT, LIMIT, resumable=False))
    told.submit("b")
    told(BatchRequested())
    assert told.running == ["a/0", "b/0"]
    told(RequestFinished("b/0", 2, 5))
    assert told.running == ["a/0"], "and it was not told to stop"
    assert told.request("a/0").state is RequestState.RUNNING
