"""What clients may bring: who is admitted, how much at once, and how slowly."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from aiohttp import web

from rollout_sched.integrations.http import HttpServer, handed
from rollout_sched.integrations.http.lingering import Lingering
from rollout_sched.integrations.http.server_connection import AT_ONCE
from tests.integrations.http.test_bodies import frame
from tests.integrations.http.test_server import body_of, cold_app, status_of
from tests.integrations.http.wires import (
    Echo,
    Wire,
    dialled,
    on_both_loops,
    post,
    read_message,
    serving,
    until,
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(handed, "LINGER_S", 0.2)


class Keyed(Echo):
    """Admits who has the key."""

    def refusal(self, method, target, fields):
        if fields.get(b"authorization") == b"Bearer k":
            return None
        return 401, [(b"content-type", b"text/plain")], b"no key"


KEY = "authorization: Bearer k\r\n"


@pytest.mark.parametrize("expect", ["", "expect: 100-continue\r\n"])
@pytest.mark.parametrize("length", ["content-length: 50000000", "transfer-encoding: chunked"])
def test_who_is_not_admitted_is_told_so_before_a_byte_of_the_body_is_kept(length, expect):
    app = Keyed()

    async def run():
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

    asyncio.run(run())


@on_both_loops
async def test_who_is_admitted_is_asked_at_each_request():
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


@on_both_loops
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


@on_both_loops
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


@on_both_loops
async def test_a_body_fast_enough_may_take_long():
    async with serving(Echo(), stall_s=0.1, body_rate=30) as (_, port):
        whole = post("/hot", b"x" * 200, "connection: close\r\n")
        answer = await slowly(port, whole, 0.003, [])
        assert answer.endswith(b"x" * 200)


# -- behind the door to the fallback -------------------------------------------------------


class Quiet(asyncio.Protocol):
    """A fallback that only takes, or does not even do that."""

    made: list[Quiet]

    def __init__(self, *, reading=True):
        self.reading = reading
        self.got = b""
        self.lost = asyncio.Event()

    def connection_made(self, transport):
        self.transport = transport
        if not self.reading:
            transport.pause_reading()

    def data_received(self, data):
        self.got += data

    def connection_lost(self, exc):
        self.lost.set()


def quiet(made, **how):
    def make():
        made.append(Quiet(**how))
        return made[-1]

    return make


@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_that_trickles_behind_the_door_is_cut_off(chunked):
    made = []
    whole = post("/cold", b"x" * 200)
    if chunked:
        whole = b"POST /cold HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        whole += b"1\r\nx\r\n" * 40

    async def run():
        limits = {"stall_s": 0.1, "body_rate": 10_000}
        async with serving(Echo(), quiet(made), **limits) as (server, port):
            sent = []
            with contextlib.suppress(ConnectionError):
                assert await slowly(port, whole, 0.01, sent) == b""
            assert len(sent) < 100
            await until(lambda: not server.connections.handed)
            assert made[0].lost.is_set()
            assert not server.bodies.used

    asyncio.run(asyncio.wait_for(run(), 20))


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
async def test_what_the_fallback_is_brought_counts_with_the_bodies():
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


# -- one client does not keep the others waiting -------------------------------------------


def test_a_flood_on_one_connection_lets_others_go_first():
    app = Echo()

    async def run():
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

    asyncio.run(run())


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


def test_a_flood_of_what_is_refused_ends_with_its_first():
    app = Keyed()

    async def run():
        server, wire = HttpServer(app), Wire()
        connection = server()
        connection.connection_made(wire)
        connection.data_received(post("/hot") * 1000)
        await asyncio.sleep(0)
        assert bytes(wire.written).count(b"HTTP/1.1 401") == 1
        await server.close(0.0)

    asyncio.run(run())
