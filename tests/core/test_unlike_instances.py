"""Instances of unlike KV memory or max_model_len: a request runs where it fits, and is not cut."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.actions import Discard
from rollout_sched.core.model.events import (
    BatchRequested,
    GroupSubmitted,
    InstanceJoined,
    InstanceLost,
    RequestFailed,
    RequestFinished,
    RequestSubmitted,
    RequestWithdrawn,
)
from tests.core.told import BIG, LIMIT, PROMPT, Told, sent

SMALL = PROMPT + LIMIT - 1

pytestmark = pytest.mark.parametrize(
    "small",
    [
        pytest.param(InstanceJoined("small", 1, SMALL), id="kv_tokens"),
        pytest.param(InstanceJoined("small", 1, BIG, max_model_len=SMALL), id="max_model_len"),
    ],
)


def small_and_big(small: InstanceJoined) -> Told:
    """A small instance that joined first, so that it is preferred, and a big one."""
    told = Told(instances=0)
    told(small, InstanceJoined("big", 1, BIG))
    return told


def ask(name: str, max_tokens: int = LIMIT) -> RequestSubmitted:
    return RequestSubmitted(name, name, PROMPT, max_tokens)


def test_request_runs_where_it_fits_entirely(small: InstanceJoined) -> None:
    told = small_and_big(small)
    assert told(ask("large")) == [sent("large", 1, "big")]
    assert told(ask("little", 5)) == [sent("little", 2, "small", max_new_tokens=5)]


def test_oversized_request_does_not_block_the_queue(small: InstanceJoined) -> None:
    told = small_and_big(small)
    told(ask("first"))
    assert told(ask("second")) == []
    assert told(ask("little", 5)) == [sent("little", 2, "small", max_new_tokens=5)]
    assert sent("second", 3, "big") in told(RequestFinished("first", 1, 7))


def test_overtaken_request_may_be_withdrawn(small: InstanceJoined) -> None:
    told = small_and_big(small)
    told(ask("first"), ask("second"))
    assert told(RequestWithdrawn("second")) == [Discard("second", 0, "withdrawn", ends=True)]
    told(RequestFinished("first", 1, 7))
    assert len(told.scheduler.parts.requests) == 0


def test_a_smaller_instance_that_joins_cuts_nothing_short(small: InstanceJoined) -> None:
    told = Told(slots=1)
    told(ask("running"), ask("waiting"))
    told(small)
    assert told(RequestFinished("running", 1, 7))[1:] == [sent("waiting", 2, "i0")]


def test_request_waits_for_the_only_instance_that_fits(small: InstanceJoined) -> None:
    told = small_and_big(small)
    told(InstanceLost("big"))
    assert told(InstanceJoined("big", 1, BIG)) == []
    assert told(ask("large")) == [sent("large", 1, "big")]
    assert told(InstanceLost("big")) == []
    assert "large" in told.scheduler.parts.requests
    assert told(InstanceJoined("big", 1, BIG)) == [sent("large", 2, "big")]


def test_oversized_waiting_request_is_refused_when_an_instance_joins(small: InstanceJoined) -> None:
    told = Told(instances=0)
    told(ask("large"), ask("little", 5))
    assert told(small) == [
        Discard("large", 0, "oversized", ends=True),
        sent("little", 1, "small", max_new_tokens=5),
    ]


def test_a_group_waits_for_the_instance_that_can_hold_it(small: InstanceJoined) -> None:
    told = small_and_big(small)
    told(GroupSubmitted("a", 2, PROMPT, LIMIT))
    assert told(BatchRequested()) == [sent("a/0", 1, "big")]
    assert sent("a/1", 2, "big") in told(RequestFinished("a/0", 1, 7))


def test_a_request_is_refused_once_the_instance_that_fits_is_removed(small: InstanceJoined) -> None:
    told = small_and_big(small)
    told(ask("large"), ask("second"))
    assert told(InstanceLost("big", requested=True)) == [
        Discard(name, 0, "oversized", ends=True) for name in ("large", "second")
    ]


def test_a_prompt_that_is_longer_than_estimated_goes_where_more_fits(small: InstanceJoined) -> None:
    told = small_and_big(small)
    told(ask("estimated", 5))
    too_long = RequestFailed("estimated", 1, "400", blame="length")
    assert told(too_long) == [sent("estimated", 2, "big", max_new_tokens=5)]
    gone = Discard("estimated", 0, "failed", ends=True)
    assert told(RequestFailed("estimated", 2, "400", blame="length")) == [gone]


def test_a_response_that_its_instance_ends_early_goes_on_where_more_fits(
    small: InstanceJoined,
) -> None:
    told = small_and_big(small)
    told(ask("estimated", 5))
    ended = RequestFinished("estimated", 1, 2, reason="length")
    assert told(ended) == [
        sent(
            "estimated",
            2,
            "big",
            context_tokens=PROMPT + 2,
            max_new_tokens=3,
            response_tokens=2,
            computed_tokens=PROMPT + 2,
        )
    ]
