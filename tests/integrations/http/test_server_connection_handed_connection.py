"""What is read and answered by somebody else is bounded all the same."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from aiohttp import web

from rollout_sched.integrations.http import server_connection as handed_connection
from tests.integrations.http.test_admission import slowly
from tests.integrations.http.test_bodies import frame
from tests.integrations.http.test_server import cold_app, status_of
from tests.integrations.http.wires import (
    Echo,
    dialled,
    on_both_loops,
    post,
    quiet,
    serving,
    until,
)

pytestmark = pytest.mark.real_time


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(handed_connection, "LINGER_S", 0.2)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_request_that_trickles_behind_the_door_is_cut_off(chunked):
    made = []
    whole = post("/cold", b"x" * 200)
    if chunked:
        whole = b"POST /cold HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        whole += b"1\r\nx\r\n" * 40
    limits = {"stall_s": 0.1, "body_rate": 10_000}
    async with serving(Echo(), quiet(made), **limits) as (server, port):
        sent = []
        with contextlib.suppress(ConnectionError):
            assert await slowly(port, whole, 0.01, sent) == b""
        assert len(sent) < 100
        await until(lambda: not server.connections.handed)
        assert made[0].lost.is_set()
        assert not server.bodies.used


@on_both_loops
async def test_behind_the_door_only_the_reading_of_a_request_is_bounded():
    async def slow(request):
        body = await request.read()
        await asyncio.sleep(0.5)
        answer = web.StreamResponse()
        answer.force_close()
        await answer.prepare(request)
        for _ in range(3):
            await answer.write(body)
            await asyncio.sleep(0.2)
        return answer

    application = web.Application()
    application.router.add_route("*", "/{rest:.*}", slow)
    runner = web.AppRunner(application)
    await runner.setup()
    limits = {"stall_s": 0.1, "head_s": 0.1, "idle_s": 0.1, "body_rate": 1e9}
    async with serving(Echo(), runner.server, **limits) as (server, port):
        for whole in (post("/cold", b"abc"), b"GET /cold HTTP/1.1\r\nhost: a\r\n\r\n"):
            async with dialled(port) as (reader, writer):
                writer.write(whole)
                answer = await reader.read()
                assert answer.startswith(b"HTTP/1.1 200 ")
                assert answer.endswith(b"0\r\n\r\n")
        await until(lambda: not server.connections.handed)
        assert not server.bodies.used
    await runner.cleanup()


@on_both_loops
async def test_a_fallback_that_does_not_read_yet_is_no_fault_of_the_client():
    made = []
    limits = {"stall_s": 0.05, "body_rate": 1e9}
    async with serving(Echo(), quiet(made, reading=False), **limits) as (server, port):
        async with dialled(port) as (_, writer):
            writer.write(post("/cold", b"x" * 100)[:-50])
            await until(lambda: bool(server.connections.handed))
            writer.write(b"x" * 50)
            await asyncio.sleep(0.3)
            assert server.connections.handed
            made[0].transport.resume_reading()
            await until(lambda: made[0].got.endswith(b"x" * 100))
            await asyncio.sleep(0.2)
            assert server.connections.handed
        await until(lambda: not server.connections.handed)


@on_both_loops
async def test_an_answer_behind_the_door_that_is_not_taken_is_not_waited_for():
    made = []
    async with serving(Echo(), quiet(made), stall_s=0.1) as (server, port):
        async with dialled(port) as (reader, writer):
            reader._limit = 4096
            writer.write(post("/cold"))
            await until(lambda: bool(server.connections.handed))
            made[0].transport.write(b"x" * (32 * 1024 * 1024))
            await made[0].lost.wait()
        assert not server.connections.handed


@on_both_loops
async def test_the_fallback_gets_one_request_and_nothing_after_it():
    made = []
    chunked = b"POST /cold HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(Echo(), quiet(made)) as (_, port):
        for whole in (post("/cold"), post("/cold", b"abc"), chunked + frame([b"abc"])):
            for cut in (len(whole), len(whole) - 1):
                async with dialled(port) as (_, writer):
                    more = post("/cold/again", b"x" * 1000)
                    writer.write((whole + more)[:cut])
                    await asyncio.sleep(0.01)
                    writer.write((whole + more)[cut:])
                    await until(lambda whole=whole: bool(made) and made[-1].got == whole)
                    for _ in range(5):
                        writer.write(more)
                        await asyncio.sleep(0.002)
                    assert made[-1].got == whole
                made.clear()


@on_both_loops
async def test_bodies_for_the_fallback_count_with_the_others():
    made = []
    async with serving(Echo(), quiet(made), max_bodies=1000) as (server, port):
        async with dialled(port) as (_, writer), dialled(port) as (refused, to_refused):
            writer.write(post("/cold", b"x" * 900)[:-100])
            await until(lambda: server.bodies.used == 800)
            to_refused.write(post("/cold", b"x" * 300)[:-300])
            assert await status_of(refused) == 503
            async with dialled(port) as (cut, to_cut):
                chunks = b"POST /cold HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
                to_cut.write(chunks + frame([b"x" * 300]))
                with contextlib.suppress(ConnectionError):
                    assert await cut.read() == b""
            assert server.refused == 2
        await until(lambda: not server.connections.handed)
        assert server.bodies.used == 0


@on_both_loops
async def test_a_body_too_long_for_the_fallback_ends_soon():
    made = []
    async with serving(Echo(), quiet(made), max_body=1000) as (server, port):
        chunks = b"POST /cold HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        for data in (chunks + b"DE0B6B3A7640000\r\n", post("/cold", b"x" * 2000)):
            async with dialled(port) as (reader, writer):
                writer.write(data)
                with contextlib.suppress(ConnectionError):
                    for _ in range(50):
                        writer.write(b"x" * 10_000)
                        await asyncio.sleep(0.001)
                assert len(made[-1].got) < 500_000
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        await until(lambda: not server.connections.handed)
        assert server.bodies.used == 0


@on_both_loops
async def test_the_fallback_itself_says_that_a_body_is_too_long():
    runner = await cold_app(client_max_size=1000)
    async with serving(Echo(), runner.server, max_body=1000) as (server, port):
        for cut in (0, 500):
            async with dialled(port) as (reader, writer):
                data = post("/cold", b"x" * 2000)
                writer.write(data[: len(data) - cut])
                assert await status_of(reader) == 413
        await until(lambda: not server.connections.handed)
    await runner.cleanup()
