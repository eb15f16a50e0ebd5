"""Control calls: what is repeated, what is refused, and by when they are given up."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm import control as control_module
from rollout_sched.integrations.vllm.control import ControlAnswer, ServerControl, Throttle
from rollout_sched.live.ports import InstanceError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@asynccontextmanager
async def wire(*scripts, limit_s=5.0):
    """A Control on a server that gives one script to each connection: for every request the
    bytes to answer with, and None to reset the connection instead."""
    left = list(scripts)
    requests = []

    async def serve(reader, writer):
        script = left.pop(0)
        try:
            for answer in script:
                head = await reader.readuntil(b"\r\n\r\n")
                requests.append(head.split(b" HTTP")[0])
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        await reader.readexactly(int(line[15:]))
                if answer is None:
                    writer.transport.abort()
                    return
                writer.write(answer)
                await writer.drain()
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    control = ServerControl(f"http://127.0.0.1:{port}", [], None, 100, limit_s)
    try:
        yield control, requests
    finally:
        await control.close()
        server.close()


async def test_a_reset_of_a_kept_connection_is_tried_again_on_a_new_one():
    async with wire([OK, None], [OK]) as (control, requests):
        await control.call("/resume")
        body = await control.call("/resume")
        assert (body, requests) == (b"{}", [b"POST /resume"] * 3)


async def test_a_reset_call_is_retried_only_once():
    async with wire([None], [None], [OK]) as (control, requests):
        with pytest.raises(InstanceError, match="/resume failed"):
            await control.call("/resume")
        assert requests == [b"POST /resume"] * 2


async def test_unsafe_calls_are_not_repeated_and_have_their_own_connection():
    async with wire([OK], [None], [OK]) as (control, requests):
        await control.call("/resume")  # leaves a connection behind that must not be used
        with pytest.raises(InstanceError, match="/update_weights failed"):
            await control.call("/update_weights", {}, repeatable=False)
        assert requests == [b"POST /resume", b"POST /update_weights"]


async def test_a_late_answer_is_a_timeout():
    async with wire([b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"], limit_s=0.05) as (
        control,
        _,
    ):
        with pytest.raises(InstanceError, match="/resume did not answer in time"):
            await control.call("/resume")


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: nonsense\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    ],
)
async def test_an_answer_that_is_no_http_is_the_instances_fault(answer):
    async with wire([answer], [answer]) as (control, _):
        with pytest.raises(InstanceError, match="/resume"):
            await control.call("/resume")


async def test_an_oversized_answer_is_refused(monkeypatch):
    monkeypatch.setattr(control_module, "LARGEST_ANSWER", 10)
    long = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n" + b"x" * 11
    async with wire([long]) as (control, _):
        with pytest.raises(InstanceError, match="more than 10 bytes"):
            await control.get("/metrics")


async def test_redirects_are_answers():
    there = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    async with wire([there]) as (control, _):
        assert await control.get("/metrics") == ControlAnswer(302, b"")


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "API key"),
        (403, "--enable-scale-out"),
        (404, "VLLM_SERVER_DEV_MODE"),
        (500, "answered 500"),
    ],
)
async def test_refusals_say_what_to_do(status, says):
    answer = b"HTTP/1.1 %d No\r\nContent-Length: 2\r\n\r\nno" % status
    async with wire([answer]) as (control, _):
        with pytest.raises(InstanceError, match=says):
            await control.call("/pause")


async def test_an_unreachable_server_is_an_error():
    async with wire() as (control, _):
        control.url = "http://127.0.0.1:1"
        with pytest.raises(InstanceError, match="/metrics failed"):
            await control.get("/metrics")


async def test_no_more_calls_in_a_second_than_allowed():
    allow = Throttle(5, "control_rate")
    calls = [asyncio.create_task(allow.acquire()) for _ in range(20)]
    done, waiting = await asyncio.wait(calls, timeout=0.3)
    for call in waiting:
        call.cancel()
    assert len(done) == 5


@pytest.mark.parametrize("rate", [0, -1])
def test_a_rate_below_one_is_refused(rate):
    with pytest.raises(CallerError, match="control_rate is"):
        Throttle(rate, "control_rate")


async def test_calls_without_wait_count_for_the_rate():
    allow = Throttle(2, "control_rate")
    await allow.acquire()
    assert [allow.take(), allow.take()] == [True, False]
