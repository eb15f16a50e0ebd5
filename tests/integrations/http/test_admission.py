"""What clients may bring: who is admitted, how much at once, and how slowly."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from rollout_sched.integrations.http import server_connection as handed_connection
from rollout_sched.integrations.http.connections import Lingering
from rollout_sched.integrations.http.server import HttpServer
from rollout_sched.integrations.http.server_connection import AT_ONCE
from tests.integrations.http.test_bodies import frame
from tests.integrations.http.test_server import body_of, status_of
from tests.integrations.http.wires import (
    Echo,
    Wire,
    dialled,
    on_both_loops,
    post,
    quiet,
    read_message,
    serving,
    until,
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(handed_connection, "LINGER_S", 0.2)


class Keyed(Echo):
    """Admits who has the key."""

    def refusal(self, method, target, fields):
        if fields.get(b"authorization") == b"Bearer k":
            return None
        return 401, [(b"content-type", b"text/plain")], b"no key"


KEY = "authorization: Bearer k\r\n"


@pytest.mark.parametrize("expect", ["", "expect: 100-continue\r\n"])
@pytest.mark.parametrize("length", ["content-length: 50000000", "transfer-encoding: chunked"])
async def test_a_refused_client_is_answered_before_a_byte_of_its_body_is_kept(length, expect):
    app = Keyed()
    async with serving(app) as (server, port), dialled(port) as (reader, writer):
        head = f"POST /hot HTTP/1.1\r\nhost: x\r\n{expect}{length}\r\n\r\n".encode()
        writer.write(head + frame([b"x" * 100_000], b""))
        answer = await read_message(reader)
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"\r\ncontent-type: text/plain\r\n" in answer
        assert b"\r\nconnection: close\r\n" in answer
        assert answer.endswith(b"\r\n\r\nno key")
        (connection,) = server.connections.served
        assert isinstance(connection, Lingering)  # which keeps nothing
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                writer.write(b"x" * 100_000)
                await asyncio.sleep(0.001)
                assert not server.bodies.used
    assert not app.requests


@on_both_loops
async def test_admission_is_checked_at_each_request():
    app = Keyed()
    async with serving(app) as (_, port), dialled(port) as (reader, writer):
        writer.write(post("/hot", b"a", KEY) + post("/hot", b"b", KEY) + post("/hot", b"c"))
        assert [await body_of(reader) for _ in range(3)] == [b"a", b"b", b"no key"]
        assert len(app.requests) == 2


@on_both_loops
async def test_bodies_that_are_being_read_and_held_share_one_bound():
    app = Echo(lambda request: None)
    async with serving(app, max_bodies=1000, max_body=600) as (server, port):
        async with contextlib.AsyncExitStack() as stack:
            dial = [await stack.enter_async_context(dialled(port)) for _ in range(5)]
            whole, partly, chunked, late, small = dial
            whole[1].write(post("/hot", b"x" * 400))
            partly[1].write(post("/hot", b"x" * 500)[:-250])
            await until(lambda: server.bodies.used == 650)
            chunks = b"POST /hot HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
            chunked[1].write(chunks + frame([b"x" * 300], b""))
            await until(lambda: server.bodies.used == 950)
            # What does not fit is refused at the head, and where it becomes too much.
            late[1].write(post("/hot", b"x" * 51)[:-51])
            refusal = await late[0].read()
            assert refusal.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in refusal
            small[1].write(post("/hot", b"x" * 50))
            await until(lambda: len(app.requests) == 2)
            chunked[1].write(frame([b"x"]))
            assert await status_of(chunked[0]) == 503
            await until(lambda: server.bodies.used == 700)
            assert server.refused == 2
            # Every end lets go.
            partly[1].transport.abort()
            await until(lambda: server.bodies.used == 450)
            app.requests[0].answer(200, (), b"")
            assert await status_of(whole[0]) == 200
            assert server.bodies.used == 50
            whole[1].write(post("/hot", b"x" * 600))
            await until(lambda: server.bodies.used == 650)
            small[1].transport.abort()
            await until(lambda: server.bodies.used == 600)
        await until(lambda: not server.bodies.used)


@pytest.mark.real_time
async def test_every_end_of_a_request_lets_go_of_its_bytes():
    def react(request):
        if request.target == b"/hot/raises":
            raise RuntimeError("from a test")
        if request.target == b"/hot/streams":
            request.begin(200, ())
            request.end()
        elif request.target != b"/hot/waits":
            request.answer(200, (), b"")

    asyncio.get_running_loop().set_exception_handler(lambda loop, what: None)
    limits = {"max_body": 500, "head_s": 0.05, "idle_s": 0.05, "stall_s": 0.05}
    chunks = b"POST /hot HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(Echo(react), **limits) as (server, port):
        for data in (
            post("/hot/raises", b"abc"),
            post("/hot/streams", b"abc"),
            post("/hot", b"abc"),
            post("/hot/waits", b"abc"),
            post("/hot", b"abc")[:-1],
            chunks + b"3\r\nabc\r\nzz\r\n",
            chunks + frame([b"x" * 400, b"y" * 400]),
            chunks + frame([b"x" * 400])[:-2],
        ):
            async with dialled(port) as (_, writer):
                writer.write(data)
                await asyncio.sleep(0.02)
            await until(lambda: not server.connections.served)
            assert server.bodies.used == 0


def slowly(port, whole, every_s, sent):
    """Send a request's last bytes one by one; what is answered."""

    async def run():
        async with dialled(port) as (reader, writer):
            answer = asyncio.ensure_future(reader.read())
            writer.write(whole[:-200])
            for byte in whole[-200:]:
                if answer.done():
                    break
                await asyncio.sleep(every_s)
                writer.write(bytes([byte]))
                sent.append(byte)
            return await answer

    return run()


async def test_a_body_that_trickles_is_not_waited_for():
    chunked = b"POST /hot HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(Echo(), stall_s=0.1, body_rate=10_000) as (server, port):
        for whole in (
            post("/hot", b"x" * 200),
            chunked + b"1\r\nx\r\n" * 40,
            chunked + b"1;" + b"x" * 200,
        ):
            sent = []
            answer = await slowly(port, whole, 0.01, sent)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert len(sent) < 100
        await until(lambda: not server.connections.served)
        assert not server.bodies.used


async def test_a_body_fast_enough_may_take_long():
    async with serving(Echo(), stall_s=0.1, body_rate=30) as (_, port):
        whole = post("/hot", b"x" * 200, "connection: close\r\n")
        answer = await slowly(port, whole, 0.003, [])
        assert answer.endswith(b"x" * 200)


# -- behind the door to the fallback -------------------------------------------------------


# -- one client does not keep the others waiting -------------------------------------------


async def test_a_flood_on_one_connection_lets_others_go_first():
    app = Echo()
    server = HttpServer(app)
    flood, other = server(), server()
    for connection in (flood, other):
        connection.connection_made(Wire())
    flood.data_received(post("/hot/flood") * 1000)
    assert len(app.requests) == AT_ONCE
    other.data_received(post("/hot/other"))
    assert app.requests[-1].target == b"/hot/other"
    while len(app.requests) < 1001:
        before = len(app.requests)
        await asyncio.sleep(0)
        assert len(app.requests) - before <= AT_ONCE
    await server.close(0.0)


@on_both_loops
async def test_a_flood_of_tiny_chunks_is_refused():
    for target in ("/hot", "/cold"):
        head = f"POST {target} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        async with serving(Echo(), quiet([])) as (server, port), dialled(port) as (reader, writer):
            writer.write(head.encode() + b"1\r\nx\r\n" * 2000)
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
                assert answer.startswith(b"HTTP/1.1 400 " if target == "/hot" else b"")
            await until(
                lambda server=server: not (server.connections.served or server.connections.handed)
            )


async def test_a_flood_of_what_is_refused_ends_with_its_first():
    app = Keyed()
    server, wire = HttpServer(app), Wire()
    connection = server()
    connection.connection_made(wire)
    connection.data_received(post("/hot") * 1000)
    await asyncio.sleep(0)
    assert bytes(wire.written).count(b"HTTP/1.1 401") == 1
    await server.close(0.0)
