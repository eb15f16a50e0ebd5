"""An answer over HTTP is over once, however it comes to be over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from rollout_sched.integrations.gateway.data_plane.fields import BadRequest
from rollout_sched.integrations.gateway.data_plane.reply import (
    MAX_WAITING,
    HttpReply,
    Limits,
    Load,
    OpenCalls,
    Pacer,
    Responses,
    TooMany,
    Unavailable,
    error_headers,
    log_failure,
)
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import Outcome
from tests import virtual_net
from tests.core.told import make_scheduler
from tests.integrations.gateway.data_plane.stage import BODY, Stage
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.integrations.gateway.scripted import Call, Exchange, Instance, chunk, completion

HEADERS = [(b"x", b"1")]

#: What can end it, each of which may come after any other.
ENDS: dict[str, Callable[[HttpReply, Call], Any]] = {
    "answer": lambda reply, call: reply.answer(200, HEADERS, b"{}"),
    "end": lambda reply, call: reply.end(),
    "fail": lambda reply, call: reply.fail(503, "no"),
    "gone": lambda reply, call: call.hang_up(),
}


class Waiting:
    """A reply to a call of two responses and 100 bytes, and what its driver is told."""

    def __init__(self) -> None:
        self.call = Call("/v1/completions", b"{}")
        self.calls = OpenCalls(Limits(retry_after_s=7))
        self.driver = Driver(make_scheduler(batching="sync"))
        self.reply = HttpReply(self.calls, self.driver, self.call, "c", Load(2, 100))

    def assert_left(self) -> None:
        assert self.reply.over
        assert (self.calls.open.requests, self.calls.open.body_bytes, list(self.calls.replies)) == (
            0,
            0,
            [],
        )
        assert self.calls.pacer.streams == 0


@pytest.fixture
@asynccontextmanager
async def the() -> AsyncIterator[Waiting]:
    made = Waiting()
    yield made
    await made.driver.close()


async def test_a_reply_counts_while_it_is_open(the: Waiting) -> None:
    assert (the.calls.open.requests, the.calls.open.body_bytes) == (2, 100)
    assert list(the.calls.replies) == [the.reply]
    assert not the.reply.over


@pytest.mark.parametrize("second", ENDS)
@pytest.mark.parametrize("first", [end for end in ENDS if end != "end"])
async def test_events_after_the_end_change_nothing(first: str, second: str, the: Waiting) -> None:
    ENDS[first](the.reply, the.call)
    the.assert_left()
    told = (the.call.status, the.call.data)
    ENDS[second](the.reply, the.call)
    the.reply.begin(HEADERS)(b"late")
    the.assert_left()
    assert (the.call.status, the.call.data) == told


@pytest.mark.parametrize("second", ENDS)
@pytest.mark.parametrize("first", [end for end in ENDS if end != "answer"])
async def test_events_after_the_end_of_a_stream_change_nothing(
    first: str, second: str, the: Waiting
) -> None:
    write = the.reply.begin(HEADERS)
    write(b"1")
    assert (the.call.status, the.calls.pacer.streams) == (200, 1)
    ENDS[first](the.reply, the.call)
    the.assert_left()
    told = the.call.data
    ENDS[second](the.reply, the.call)
    write(b"2")
    assert the.call.data == told


async def test_a_failure_is_an_answer_or_the_last_event_of_a_stream() -> None:
    whole, stream = Waiting(), Waiting()
    whole.reply.fail(503, "no")
    assert (whole.call.status, whole.call.answer_headers[b"retry-after"]) == (503, b"7")
    stream.reply.begin(HEADERS)
    stream.reply.fail(503, "no")
    assert stream.call.over.is_set()
    assert stream.call.data == b"data: " + whole.call.data + b"\n\n"
    assert msgspec.json.decode(whole.call.data)["error"]["message"] == "no"


async def test_requests_made_after_the_end_are_withdrawn(the: Waiting) -> None:
    the.reply.fail(500, "no")
    name = the.driver.submit(_Payload(), 3, 5, "g", "")
    assert len(the.driver.front.payloads) == 1
    the.reply.submitted(name)
    assert len(the.driver.front.payloads) == 0


async def test_a_slow_client_slows_its_instance_down(the: Waiting) -> None:
    exchange = Exchange()
    the.reply.upstream(exchange)
    the.call.pause()
    assert exchange.paused == 1
    the.call.resume()
    assert exchange.paused == 0


async def test_a_failed_final_write_ends_the_call(the: Waiting) -> None:
    def over(outcome: Any) -> None:
        raise RuntimeError("boom")

    the.reply.paced(over, Outcome(0, "stop", (), None))
    assert the.call.status == 500
    the.assert_left()


@pytest.mark.parametrize(("status", "retries"), [(503, True), (500, False), (413, False)])
def test_only_retryable_errors_have_retry_after(status: int, retries: bool) -> None:
    assert (b"retry-after" in dict(error_headers(status, Limits()))) is retries


class _Payload:
    """Nothing is begun: no instance is here."""

    resumable = True

    class transcript:
        @staticmethod
        def drop(attempt: int) -> None: ...

    class responder:
        @staticmethod
        def fail(reason: str, error: Any) -> None: ...

    def begin(self, *_: Any) -> Any:
        raise AssertionError


class Reply:
    def fail(self, status: int, text: str) -> None: ...


async def test_a_disconnect_frees_its_place() -> None:
    calls, one, two = OpenCalls(Limits(requests=3, body_bytes=100)), Reply(), Reply()
    calls.enter(one, "", Load(2, 60))
    calls.enter(two, "c", Load(1, 40))
    assert (calls.open.requests, calls.open.body_bytes, list(calls.replies)) == (3, 100, [one, two])
    with pytest.raises(Unavailable, match="3 responses are pending, the limit is 3"):
        calls.check_room("d", Load(1))
    calls.leave(two, "c", Load(1, 40))
    calls.check_room("d", Load(1, 40))
    with pytest.raises(Unavailable, match="pending bodies have 60, the limit is 100"):
        calls.check_room("d", Load(1, 41))
    calls.leave(one, "", Load(2, 60))
    assert (calls.open.requests, calls.open.body_bytes, list(calls.replies)) == (0, 0, [])


@pytest.mark.parametrize("what", ["requests", "body_bytes"])
async def test_a_client_leaves_room_for_those_that_have_less(what: str) -> None:
    calls, one = OpenCalls(Limits(**{what: 64})), Load(**{"requests": 1, what: 1})
    for client, places in (("flood", 60), ("other", 2), ("third", 1)):
        for _ in range(places):
            calls.check_room(client, one)
            calls.enter(Reply(), client, one)
        with pytest.raises(TooMany, match=f"{places} of the 64"):
            calls.check_room(client, one)
    calls.enter(Reply(), "", one)
    with pytest.raises(Unavailable, match="the limit is 64"):
        calls.check_room("", one)


@pytest.mark.parametrize(
    ("limit", "what"), [("client_requests", "requests"), ("client_tokens", "tokens")]
)
async def test_a_client_has_limits_of_its_own(limit: str, what: str) -> None:
    calls, reply = OpenCalls(Limits(**{limit: 5})), Reply()
    size = Load(**{what: 3})
    calls.enter(reply, "c", size)
    calls.check_room("d", size)
    calls.check_room("", size)
    with pytest.raises(TooMany, match="are pending, its limit is 5, the call asks for 3"):
        calls.check_room("c", size)
    with pytest.raises(BadRequest, match="limit is 5"):
        calls.check_room("d", Load(**{what: 6}))
    calls.leave(reply, "c", size)
    assert not calls.clients


async def test_replies_are_in_the_order_in_which_they_came() -> None:
    """Who waits is told in that order, which is the same in each process."""
    calls, replies = OpenCalls(Limits()), [Reply() for _ in range(50)]
    for reply in replies:
        calls.enter(reply, "c", Load(1))
    assert list(calls.replies) == replies


STREAM = {**BODY, "stream": True}


def never(error: Exception) -> None:
    raise AssertionError("nothing has failed") from error


def taken_by_turn(count: int, streams: int, turns: int) -> list[int]:
    """How many of `count` pieces of work were done after each turn of the loop."""
    done: list[int] = []

    async def scene() -> list[int]:
        queue = Pacer()
        queue.streams = streams
        for piece in range(count):
            queue.take(done.append, piece, never)
        seen = [len(done)]
        for _ in range(turns):
            await asyncio.sleep(0)
            seen.append(len(done))
        return seen

    seen = virtual_net.run(scene())
    assert done == sorted(done)
    return seen


class TestTurns:
    def test_unary_replies_do_not_wait_without_streams(self) -> None:
        assert taken_by_turn(5, streams=0, turns=1) == [5, 5]

    def test_unary_replies_beside_streams_are_written_in_order(self) -> None:
        assert taken_by_turn(4, streams=1, turns=4) == [1, 2, 3, 4, 4]

    def test_a_full_queue_writes_the_oldest_reply_at_once(self) -> None:
        assert taken_by_turn(MAX_WAITING + 3, streams=1, turns=1) == [3, 4]

    async def test_a_later_reply_stays_behind_waiting_ones(self) -> None:
        queue, done = Pacer(), list[str]()
        queue.streams = 1
        for name in "abc":
            queue.take(done.append, name, never)
        queue.streams = 0
        await asyncio.sleep(0)
        queue.take(done.append, "d", never)
        assert done == ["a", "b"]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert done == ["a", "b", "c", "d"]

    @pytest.mark.parametrize("streams", [0, 1])
    @pytest.mark.parametrize("after", [0, MAX_WAITING + 2])
    async def test_a_failed_reply_fails_no_other(self, streams: int, after: int) -> None:
        """At once, in a later turn, and out of turn, where it hit who came then."""

        def fail(_: object) -> None:
            raise ValueError("of its own")

        def fail_too(error: Exception) -> None:
            failures.append(error)
            raise ValueError("and nobody can be told")

        failures: list[Exception] = []
        queue, done = Pacer(), list[int]()
        queue.streams = streams
        queue.take(done.append, 0, never)
        queue.take(fail, None, failures.append)
        queue.take(fail, None, fail_too)
        for piece in range(1, after):
            queue.take(done.append, piece, never)
        while len(done) < max(1, after) or len(failures) < 2:
            await asyncio.sleep(0.001)
        assert done == list(range(max(1, after)))
        assert [str(error) for error in failures] == ["of its own"] * 2


class TestCallsBesideStreams:
    async def test_events_pass_between_two_calls_that_came_together(self, stage, instance) -> None:
        stream = await self.open(stage, instance)
        for _ in range(3):
            stage.call()
        before = len(instance.pool.asked)
        await instance.event(0, chunk([8]))
        assert b'"token_ids":[8]' in stream.data
        assert len(instance.pool.asked) == before == 2
        await instance.asked(3)

    async def test_a_client_that_leaves_before_its_turn_sends_no_request(
        self, stage, instance
    ) -> None:
        await self.open(stage, instance)
        stage.call()
        going = stage.call()
        going.disconnected = True
        stage.call()
        await instance.asked(2)
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(instance.pool.asked) == 3
        assert stage.data_plane.calls.open.requests == 3

    async def test_the_second_of_streams_ending_together_waits_for_its_turn(
        self, stage, instance
    ) -> None:
        streams = [await self.open(stage, instance) for _ in range(3)]
        await asyncio.sleep(0)  # the last one's beginning was this turn's work
        for number in (0, 1):
            await instance.event(number, chunk([8], "stop"), end=True)
        assert [stream.over.is_set() for stream in streams] == [True, False, False]
        await instance.event(2, chunk([8]))
        assert b'"token_ids":[8]' in streams[2].data
        assert (await streams[1].events())[-1] == b"[DONE]"

    async def test_streams_are_counted_while_they_are_open(self, stage, instance) -> None:
        ended = await self.open(stage, instance)
        left = await self.open(stage, instance)
        assert stage.data_plane.calls.pacer.streams == 2
        await instance.event(0, chunk([8], "stop"), end=True)
        await ended.events()
        assert stage.data_plane.calls.pacer.streams == 1
        left.hang_up()
        assert stage.data_plane.calls.pacer.streams == 0

    @staticmethod
    async def open(stage: Stage, instance: Instance) -> Call:
        """A stream that has brought its first token."""
        number = len(instance.pool.asked)
        stream = stage.call(STREAM)
        await instance.event(number, chunk([7]))
        assert stream.status == 200
        return stream


def test_calls_are_counted_by_status() -> None:
    responses = Responses()
    for status in (200, 404, 200):
        responses.end(b"GET", b"/", status, responses.begin())
    assert responses.by_status == {200: 2, 404: 1}


async def test_the_access_log_omits_the_query(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rollout_sched.access")
    async with House(Upstream(), access_log=True) as house:
        await house.ask("GET", "/version?api_key=secret")
        body = {"model": "tiny", "prompt": "secret", "max_tokens": "many"}
        path = "/v1/completions?key=secret"
        assert (await house.session.post(path, json=body)).status == 400
        await house.ask("GET", "/v1/%0Aforged%20line")
    told = [record for record in caplog.records if record.name == "rollout_sched.access"]
    lines = [record.getMessage().rpartition(" ")[0].rpartition(" ")[0] for record in told]
    assert lines[:2] == ["GET /version 200", "POST /v1/completions 400"]
    assert "\n" not in lines[2]
    assert "secret" not in caplog.text
    assert told[0].fields["status"] == 200  # type: ignore[attr-defined]


def test_failures_are_not_in_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    log_failure(RuntimeError("from a test"))
    assert [record.name for record in caplog.records] == [log_failure.__module__]


async def test_the_access_log_is_off_by_default(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rollout_sched.access")
    async with House(Upstream()) as house:
        await house.ask("GET", "/version")
    assert not [record for record in caplog.records if record.name == "rollout_sched.access"]


@pytest.mark.parametrize(
    ("limits", "body", "status", "says"),
    [
        (Limits(samples=2), {**BODY, "n": 3}, 400, "the limit per call is 2"),
        (Limits(requests=2), {**BODY, "n": 3}, 400, "the limit per call is 2"),
        (Limits(body_bytes=10), BODY, 413, "the limit for all bodies is 10"),
    ],
)
async def test_calls_above_the_limit_itself_are_refused_for_good(
    limits: Limits, body: object, status: int, says: str
) -> None:
    async with Stage(Instance(), data_plane={"limits": limits}) as stage:
        call = stage.call(body)
        assert says in (await call.json())["error"]["message"]
        assert call.status == status
        assert b"retry-after" not in call.answer_headers
        stage.settled()


async def test_calls_that_do_not_fit_now_get_retry_after() -> None:
    instance = Instance()
    limits = Limits(requests=1, retry_after_s=7)
    async with Stage(instance, data_plane={"limits": limits}) as stage:
        first, second = stage.call(), stage.call()
        assert (second.status, second.answer_headers[b"retry-after"]) == (503, b"7")
        await instance.answer(0, completion([4]))
        await first.json()
        assert stage.call().status == 0
        await instance.answer(1, completion([4]))
