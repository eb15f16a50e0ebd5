"""An answer over HTTP is over once, however it comes to be over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any

import msgspec
import pytest

from rollout_sched.integrations.gateway.data_plane.reply import (
    HttpReply,
    Limits,
    OpenCalls,
    error_headers,
)
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import Outcome
from tests.core.told import make_scheduler
from tests.integrations.gateway.scripted import Call, Exchange

HEADERS = [(b"x", b"1")]

#: What can end it, each of which may come after any other.
ENDS: dict[str, Callable[[HttpReply, Call], Any]] = {
    "answer": lambda reply, call: reply.answer(200, HEADERS, b"{}"),
    "end": lambda reply, call: reply.end(),
    "fail": lambda reply, call: reply.fail(503, "no"),
    "gone": lambda reply, call: call.on_disconnect(),  # type: ignore[misc]
}


def in_a_loop(test: Callable[..., None]) -> Callable[..., None]:
    """The driver is made inside a running event loop."""

    @wraps(test)
    def run(**arguments: Any) -> None:
        async def scene() -> None:
            test(**arguments)

        asyncio.run(scene())

    return run


class Waiting:
    """A reply to a call of two responses and 100 bytes, and what its driver is told."""

    def __init__(self) -> None:
        self.call = Call("/v1/completions", b"{}")
        self.calls = OpenCalls(Limits(retry_after_s=7))
        self.driver = Driver(make_scheduler(batching="sync"))
        self.reply = HttpReply(self.calls, self.driver, self.call, 2, 100)

    def assert_left(self) -> None:
        assert self.reply.over
        assert (self.calls.requests, self.calls.body_bytes, list(self.calls.replies)) == (0, 0, [])
        assert self.calls.pacer.streams == 0


@in_a_loop
def test_it_counts_while_it_is_open() -> None:
    the = Waiting()
    assert (the.calls.requests, the.calls.body_bytes) == (2, 100)
    assert list(the.calls.replies) == [the.reply]
    assert not the.reply.over


@pytest.mark.parametrize("second", ENDS)
@pytest.mark.parametrize("first", [end for end in ENDS if end != "end"])
@in_a_loop
def test_whatever_ends_it_the_rest_changes_nothing(first: str, second: str) -> None:
    the = Waiting()
    ENDS[first](the.reply, the.call)
    the.assert_left()
    told = (the.call.status, the.call.data)
    ENDS[second](the.reply, the.call)
    the.reply.begin(HEADERS)(b"late")
    the.assert_left()
    assert (the.call.status, the.call.data) == told


@pytest.mark.parametrize("second", ENDS)
@pytest.mark.parametrize("first", [end for end in ENDS if end != "answer"])
@in_a_loop
def test_nor_does_it_of_a_stream(first: str, second: str) -> None:
    the = Waiting()
    write = the.reply.begin(HEADERS)
    write(b"1")
    assert (the.call.status, the.calls.pacer.streams) == (200, 1)
    ENDS[first](the.reply, the.call)
    the.assert_left()
    told = the.call.data
    ENDS[second](the.reply, the.call)
    write(b"2")
    assert the.call.data == told


@in_a_loop
def test_a_failure_is_an_answer_or_the_last_event_of_a_stream() -> None:
    whole, stream = Waiting(), Waiting()
    whole.reply.fail(503, "no")
    assert (whole.call.status, whole.call.answer_headers[b"retry-after"]) == (503, b"7")
    stream.reply.begin(HEADERS)
    stream.reply.fail(503, "no")
    assert stream.call.over.is_set()
    assert stream.call.data == b"data: " + whole.call.data + b"\n\n"
    assert msgspec.json.decode(whole.call.data)["error"]["message"] == "no"


@in_a_loop
def test_what_is_asked_for_after_its_end_is_withdrawn() -> None:
    the = Waiting()
    the.reply.fail(500, "no")
    name = the.driver.submit(_Payload(), 3, 5, "g", "")
    assert len(the.driver.front.payloads) == 1
    the.reply.submitted(name)
    assert len(the.driver.front.payloads) == 0


@in_a_loop
def test_a_slow_client_slows_its_instance_down() -> None:
    the, exchange = Waiting(), Exchange()
    the.reply.upstream(exchange)
    assert the.call.on_pause is not None
    assert the.call.on_resume is not None
    the.call.on_pause()
    assert exchange.paused == 1
    the.call.on_resume()
    assert exchange.paused == 0


@in_a_loop
def test_an_end_that_cannot_be_told_ends_the_call() -> None:
    def over(outcome: Any) -> None:
        raise RuntimeError("boom")

    the = Waiting()
    the.reply.paced(over, Outcome(0, "stop", (), None))
    assert the.call.status == 500
    the.assert_left()


@pytest.mark.parametrize(("status", "retries"), [(503, True), (500, False), (413, False)])
def test_only_what_may_be_tried_again_says_when(status: int, retries: bool) -> None:
    assert (b"retry-after" in dict(error_headers(status, Limits()))) is retries


class _Payload:
    """Nothing is begun: no instance is here."""

    class transcript:
        @staticmethod
        def drop(attempt: int) -> None: ...

    class responder:
        @staticmethod
        def fail(reason: str, error: Any) -> None: ...

    def begin(self, *_: Any) -> Any:
        raise AssertionError
