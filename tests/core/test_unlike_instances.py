"""Instances of unlike KV memory: a request runs where all of it fits, and is never cut short."""

from __future__ import annotations

from rollout_sched.core.model.actions import Discard
from rollout_sched.core.model.events import (
    BatchRequested,
    GroupSubmitted,
    InstanceJoined,
    InstanceLost,
    RequestFinished,
    RequestSubmitted,
    RequestWithdrawn,
)
from tests.core.told import BIG, LIMIT, PROMPT, Told, sent

SMALL = PROMPT + LIMIT - 1


def small_and_big(*, slots: int = 1) -> Told:
    """A small instance that joined first, so that it is preferred, and a big one."""
    told = Told(instances=0)
    told(InstanceJoined("small", slots, SMALL), InstanceJoined("big", slots, BIG))
    return told


def ask(name: str, max_tokens: int = LIMIT) -> RequestSubmitted:
    return RequestSubmitted(name, name, PROMPT, max_tokens)


def test_request_runs_where_it_fits_entirely() -> None:
    told = small_and_big()
    assert told(ask("large")) == [sent("large", 1, "big")]
    assert told(ask("little", 5)) == [sent("little", 2, "small", max_new_tokens=5)]


def test_oversized_request_does_not_block_the_queue() -> None:
    told = small_and_big()
    told(ask("first"))
    assert told(ask("second")) == []
    assert told(ask("little", 5)) == [sent("little", 2, "small", max_new_tokens=5)]
    assert sent("second", 3, "big") in told(RequestFinished("first", 1, 7))


def test_overtaken_request_may_be_withdrawn() -> None:
    told = small_and_big()
    told(ask("first"), ask("second"))
    assert told(RequestWithdrawn("second")) == [Discard("second", 0, "withdrawn", ends=True)]
    told(RequestFinished("first", 1, 7))
    assert len(told.scheduler.parts.requests) == 0


def test_a_smaller_instance_that_joins_cuts_nothing_short() -> None:
    told = Told(slots=1)
    told(ask("running"), ask("waiting"))
    told(InstanceJoined("small", 1, SMALL))
    assert told(RequestFinished("running", 1, 7))[1:] == [sent("waiting", 2, "i0")]


def test_request_waits_for_the_only_instance_that_fits() -> None:
    told = small_and_big()
    told(InstanceLost("big"))
    assert told(InstanceJoined("big", 1, BIG)) == []
    assert told(ask("large")) == [sent("large", 1, "big")]
    assert told(InstanceLost("big")) == []
    assert "large" in told.scheduler.parts.requests
    assert told(InstanceJoined("big", 1, BIG)) == [sent("large", 2, "big")]


def test_oversized_waiting_request_is_refused_when_an_instance_joins() -> None:
    told = Told(instances=0)
    told(ask("large"), ask("little", 5))
    assert told(InstanceJoined("small", 1, SMALL)) == [
        Discard("large", 0, "oversized", ends=True),
        sent("little", 1, "small", max_new_tokens=5),
    ]


def test_a_group_waits_for_the_instance_that_can_hold_it() -> None:
    told = small_and_big()
    told(GroupSubmitted("a", 2, PROMPT, LIMIT))
    assert told(BatchRequested()) == [sent("a/0", 1, "big")]
    assert sent("a/1", 2, "big") in told(RequestFinished("a/0", 1, 7))
