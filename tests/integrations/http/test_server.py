"""The server over real sockets: every way a client can behave."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import math

import pytest
from aiohttp import ClientSession, web

from rollout_sched.integrations.http import Pool, ReceivedRequest, ServerLimits
from rollout_sched.integrations.http.heads import MAX_LINES
from rollout_sched.integrations.http.server import HttpServer
from rollout_sched.integrations.http.server_connection import READ_AHEAD
from tests.integrations.http.test_bodies import frame
from tests.integrations.http.wires import (
    Echo,
    Wire,
    client_tls,
    dialled,
    on_both_loops,
    post,
    read_message,
    server_tls,
    serving,
    until,
)

pytestmark = pytest.mark.real_time


async def status_of(reader) -> int:
    return int((await read_message(reader)).split(b" ", 2)[1])


async def body_of(reader) -> bytes:
    return (await read_message(reader)).partition(b"\r\n\r\n")[2]


@on_both_loops
async def test_requests_one_after_the_other_on_one_connection():
    app = Echo()
    async with serving(app) as (_, port), dialled(port) as (reader, writer):
        for i in range(3):
            writer.write(post(f"/hot?{i}", b"body %d" % i, "X-A: b\r\n"))
            assert await body_of(reader) == b"body %d" % i
        assert [r.target for r in app.requests] == [b"/hot?0", b"/hot?1", b"/hot?2"]
        assert app.requests[0].method == b"POST"
        assert app.requests[0].headers[1] == (b"x-a", b"b")


@on_both_loops
async def test_every_address_has_ipv4_too():
    server = HttpServer(Echo(), None)
    listener = await server.listen("::", 0)
    for to in ("127.0.0.1", "::1"):
        reader, writer = await asyncio.open_connection(to, listener.sockets[0].getsockname()[1])
        writer.write(post("/hot", b"body"))
        assert await body_of(reader) == b"body"
        writer.close()
    await server.close(0.0)


@pytest.mark.parametrize("later", [False, True])
async def test_pipelined_requests_are_answered_in_order_one_at_a_time(later):
    running = 0

    def react(request):
        nonlocal running
        running += 1
        assert running == 1
        if later:
            asyncio.get_running_loop().call_soon(finish, request)
        else:
            finish(request)

    def finish(request):
        nonlocal running
        running -= 1
        request.answer(200, (), request.body)

    async with serving(Echo(react)) as (_, port), dialled(port) as (reader, writer):
        # Many, so that answering from within a call would run out of stack.
        writer.write(b"".join(post("/hot", b"%d" % i) for i in range(3000)))
        for i in range(3000):
            assert await body_of(reader) == b"%d" % i


@on_both_loops
async def test_requests_sent_ahead_of_an_answer_are_bounded():
    app = Echo(lambda request: None)
    async with serving(app) as (server, port), dialled(port) as (reader, writer):
        body = b"x" * 50_000
        writer.write(b"".join(post("/hot", body) for _ in range(400)))
        await until(lambda: len(app.requests) == 1)
        (connection,) = server.connections.served
        await until(lambda: connection._stopped)
        assert len(connection._buffer.data) <= READ_AHEAD + 512 * 1024
        for i in range(400):
            await until(lambda i=i: len(app.requests) == i + 1)
            app.requests[i].answer(200, (), app.requests[i].body)
        for _ in range(400):
            assert await body_of(reader) == body


@on_both_loops
async def test_a_chunked_request():
    async with serving(Echo()) as (_, port), dialled(port) as (reader, writer):
        head = b"POST /hot HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + frame([b"abc", b"d" * 1000]) + post("/hot", b"next"))
        assert await body_of(reader) == b"abc" + b"d" * 1000
        assert await body_of(reader) == b"next"


@on_both_loops
async def test_expect_100_continue():
    async with serving(Echo(), max_body=10) as (_, port), dialled(port) as (reader, writer):
        whole = post("/hot", b"abc", "expect: 100-continue\r\n")
        writer.write(whole[:-3])
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(whole[-3:])
        assert await body_of(reader) == b"abc"
        writer.write(post("/hot", b"x" * 11, "expect: 100-continue\r\n")[:-11])
        assert await status_of(reader) == 413


@pytest.mark.parametrize("missing", [0, 3])
async def test_an_unknown_expectation(missing):
    app = Echo()
    async with serving(app) as (_, port), dialled(port) as (reader, writer):
        whole = post("/hot", b"abc", "expect: the-unexpected\r\n")
        writer.write(whole[: len(whole) - missing])
        assert await status_of(reader) == 417
        assert not app.requests


@on_both_loops
async def test_http_1_0():
    async with serving(Echo()) as (_, port):
        async with dialled(port) as (reader, writer):
            writer.write(b"POST /hot HTTP/1.0\r\ncontent-length: 1\r\n\r\na")
            answer = await reader.read()
            assert b"connection: close" in answer
            assert answer.endswith(b"\r\n\r\na")
        async with dialled(port) as (reader, writer):
            for _ in range(2):
                writer.write(b"POST /hot HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
                assert b"connection: keep-alive" in await read_message(reader)


@on_both_loops
async def test_connection_close():
    async with serving(Echo()) as (server, port), dialled(port) as (reader, writer):
        writer.write(post("/hot", b"a", "connection: close\r\n") + post("/hot", b"ignored"))
        assert (await reader.read()).endswith(b"connection: close\r\ncontent-length: 1\r\n\r\na")
        writer.close()
        await until(lambda: not server.connections.served)


@on_both_loops
async def test_absolute_form():
    app = Echo()
    async with serving(app) as (_, port), dialled(port) as (reader, writer):
        writer.write(post("HTTP://user@a:1/hot?x=/", b""))
        assert await status_of(reader) == 200
        assert app.requests[0].target == b"/hot?x=/"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
        (b"GET /hot\r\n\r\n", 400),
        (b"GET /hot HTTP/2.0\r\n\r\n", 400),
        (b"GET /hot HTTP/1.1\r\n\r\n", 400),
        (b"GET /hot HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET /hot HTTP/1.1\r\nhost: a\r\na : b\r\n\r\n", 400),
        (post("/hot", b"", "transfer-encoding: chunked\r\n"), 400),
        (post("/hot", b"", "content-length: 1\r\n"), 400),
        (b"POST /hot HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST /hot HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n", 501),
        (b"POST /hot HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /hot HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 40_000, 431),
        (b"GET /hot HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /hot" + b"a" * 40_000, 431),
        (post("/hot", b"x" * 101), 413),
        (b"POST /hot HTTP/1.1\r\nhost: a\r\ncontent-length: 101\r\n\r\n", 413),
        (
            b"POST /hot HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
            + frame([b"x" * 60, b"y" * 60], b""),
            413,
        ),
        (post("/cold"), 404),
        (b"GET /hot/caf\xc3\xa9 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"GET /hot HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * MAX_LINES + b"\r\n", 431),
        (
            b"POST /hot HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
            + b"a: b\r\n" * (MAX_LINES + 1)
            + b"\r\n",
            431,
        ),
        (
            b"POST /hot HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
            b"DE0B6B3A7640000\r\n",
            413,
        ),
        (b"\r\n" * 3 + post("/hot"), 400),
    ],
)
async def test_malformed_requests_are_refused_and_the_connection_closed(data, status):
    app = Echo()
    async with serving(app, max_body=100) as (server, port), dialled(port) as (reader, writer):
        writer.write(post("/hot") + data)
        assert await status_of(reader) == 200
        refusal = await reader.read()
        assert refusal.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in refusal
        assert len(app.requests) == 1
        writer.close()
        await until(lambda: not server.connections.served)


@on_both_loops
async def test_a_refusal_reaches_a_client_that_goes_on_sending():
    async with serving(Echo(), max_body=10) as (_, port), dialled(port) as (reader, writer):
        writer.write(post("/hot", b"x" * (8 * 1024 * 1024)))
        assert await status_of(reader) == 413


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"POST /hot HTTP/1.1\r\nhost", b"HTTP/1.1 408 "),
        (b"\r\n", b"HTTP/1.1 408 "),
        (post("/hot", b"abc")[:-1], b"HTTP/1.1 408 "),
    ],
)
async def test_a_client_that_does_not_go_on_is_not_waited_for(sent, answer):
    limits = {"head_s": 0.05, "idle_s": 0.05, "stall_s": 0.05}
    async with serving(Echo(), **limits) as (server, port), dialled(port) as (reader, writer):
        writer.write(sent)
        assert (await reader.read())[: len(answer) or None] == answer
        writer.close()
        await until(lambda: not server.connections.served)


@on_both_loops
async def test_a_head_that_drips_is_cut_off():
    async with serving(Echo(), head_s=0.1) as (_, port), dialled(port) as (reader, writer):
        answer = asyncio.ensure_future(reader.read())
        for byte in post("/hot", b"", "x: " + "a" * 1000 + "\r\n"):
            if answer.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.002)
        assert (await answer).startswith(b"HTTP/1.1 408 ")


@on_both_loops
async def test_the_app_may_take_its_time():
    app = Echo(lambda request: None)
    async with serving(app) as (server, port), dialled(port) as (reader, writer):
        writer.write(post("/hot"))
        await until(lambda: app.requests)
        (connection,) = server.connections.served
        assert connection.deadline == math.inf
        app.requests[0].answer(200, (), b"")
        assert await status_of(reader) == 200


@on_both_loops
async def test_too_many_connections():
    """A busy one stays, and the next is refused; an idle one is closed for the next."""
    app = Echo(lambda request: None)
    async with serving(app, max_connections=1) as (server, port):
        async with dialled(port) as (reader, writer):
            writer.write(post("/hot"))
            await until(lambda: bool(app.requests))
            async with dialled(port) as (refused, _):
                assert await status_of(refused) == 503
            assert server.refused == 1
            app.requests.pop().answer(200, (), b"")
            assert await status_of(reader) == 200
            async with dialled(port) as (other, writer):
                writer.write(post("/hot"))
                await until(lambda: bool(app.requests))
                app.requests.pop().answer(200, (), b"")
                assert await status_of(other) == 200
            assert await reader.read() == b""
            assert server.refused == 1
        app.react = Echo().react
        await until(lambda: not server.connections.served)
        async with dialled(port) as (reader, writer):
            writer.write(post("/hot"))
            assert await status_of(reader) == 200


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
async def test_a_client_that_goes_away_is_noticed(begun, how):
    gone = asyncio.Event()

    def react(request):
        request.on_disconnect = gone.set
        if begun:
            request.begin(200, ())
            request.write(b"abc")

    app = Echo(react)
    async with serving(app) as (server, port), dialled(port) as (_, writer):
        writer.write(post("/hot"))
        await until(lambda: bool(app.requests))
        if how == "half":
            writer.write_eof()
        elif how == "reset":
            writer.transport.abort()
        else:
            writer.close()
        await gone.wait()
        assert app.requests[0].disconnected
        await until(lambda: not server.connections.served)


@on_both_loops
async def test_a_client_that_has_its_answer_is_not_a_disconnect():
    gone = []

    def react(request):
        request.on_disconnect = lambda: gone.append(1)
        request.answer(200, (), b"")

    async with serving(Echo(react)) as (server, port):
        async with dialled(port) as (reader, writer):
            writer.write(post("/hot"))
            assert await status_of(reader) == 200
        await until(lambda: not server.connections.served)
        assert not gone


@on_both_loops
async def test_a_stream_waits_for_a_slow_client():
    calls = []

    def react(request):
        request.on_pause = lambda: calls.append("pause")
        request.on_resume = lambda: calls.append("resume")
        request.begin(200, ())

    app = Echo(react)
    async with serving(app) as (_, port), dialled(port) as (reader, writer):
        reader._limit = 4096  # the client reads no further by itself
        writer.write(post("/hot"))
        await until(lambda: bool(app.requests))
        sent = 0
        while "pause" not in calls:
            app.requests[0].write(b"x" * 65536)
            sent += 65536
            await asyncio.sleep(0)
        assert calls == ["pause"]
        got = asyncio.ensure_future(read_stream(reader))
        await until(lambda: "resume" in calls)
        app.requests[0].end()
        assert await got == sent
        assert calls == ["pause", "resume"]


async def read_stream(reader) -> int:
    """Bytes in a chunked answer."""
    await reader.readuntil(b"\r\n\r\n")
    total = 0
    while size := int(await reader.readline(), 16):
        await reader.readexactly(size + 2)
        total += size
    return total


@on_both_loops
async def test_a_client_that_does_not_read_is_cut_off_when_too_much_waits():
    gone = asyncio.Event()

    def react(request):
        request.on_disconnect = gone.set
        request.begin(200, ())

    app = Echo(react)
    async with serving(app, max_unsent=1024 * 1024) as (_, port), dialled(port) as (reader, writer):
        reader._limit = 4096
        writer.write(post("/hot"))
        await until(lambda: bool(app.requests))
        while not gone.is_set():
            app.requests[0].write(b"x" * 65536)
            await asyncio.sleep(0)


@on_both_loops
async def test_a_client_that_does_not_read_is_not_waited_for():
    gone = asyncio.Event()

    def react(request):
        request.on_disconnect = gone.set
        request.begin(200, ())
        request.write(b"x" * (32 * 1024 * 1024))

    async with serving(Echo(react), stall_s=0.1) as (_, port), dialled(port) as (reader, writer):
        reader._limit = 4096
        writer.write(post("/hot"))
        await gone.wait()


@pytest.mark.parametrize("begun", [False, True])
async def test_an_app_that_fails(begun):
    def react(request):
        if begun:
            request.begin(200, ())
        raise RuntimeError("from a test")

    reported = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: reported.append(context["exception"])
    )
    async with serving(Echo(react)) as (_, port), dialled(port) as (reader, writer):
        writer.write(post("/hot"))
        if begun:
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readuntil(b"0\r\n\r\n")
        else:
            assert await status_of(reader) == 500
            writer.write(post("/hot"))
            assert await status_of(reader) == 500
        assert isinstance(reported[0], RuntimeError)


class Tripping(Echo):
    """An app that raises in one of its places."""

    def __init__(self, where, raise_):
        super().__init__(self.begin)
        self.where, self.raise_ = where, raise_
        self.gone = asyncio.Event()

    def trip(self, where, request=None):
        if where == self.where:
            raise self.raise_("from a test")

    def wants(self, method, target):
        if target == b"/hot/bad":
            self.trip("wants")
        return super().wants(method, target)

    def refusal(self, method, target, fields):
        if target == b"/hot/bad":
            self.trip("refusal")
        return

    def begin(self, request):
        if request.target != b"/hot/bad":
            request.answer(200, (), b"good")
            return
        request.on_disconnect = self.on_disconnect
        request.on_pause = functools.partial(self.trip, "on_pause")
        request.on_resume = functools.partial(self.trip, "on_resume")
        self.trip("handle")
        request.begin(200, ())
        self.trip("handle, begun")
        request.write(b"x" * 16 * 1024 * 1024)

    def on_disconnect(self):
        self.gone.set()
        self.trip("on_disconnect")


@pytest.mark.parametrize("raise_", [RuntimeError, asyncio.CancelledError])
@pytest.mark.parametrize(
    ("where", "status"),
    [
        ("wants", 500),
        ("refusal", 500),
        ("handle", 500),
        ("handle, begun", 200),
        ("on_pause", 200),
        ("on_resume", 200),
        ("on_disconnect", 200),
    ],
)
@on_both_loops
async def test_an_exception_of_the_app_ends_only_its_request(where, raise_, status):
    trouble = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: trouble.append(what))
    app = Tripping(where, raise_)
    async with asyncio.timeout(20), serving(app) as (server, port):
        async with dialled(port) as (other, to_other), dialled(port) as (reader, writer):
            to_other.write(post("/hot"))
            assert await body_of(other) == b"good"
            reader._limit = 4096
            writer.write(post("/hot/bad", b"some bytes"))
            head = await reader.readuntil(b"\r\n\r\n")
            assert int(head.split(b" ", 2)[1]) == status
            if where == "on_disconnect":
                writer.transport.abort()
            elif status == 200:  # cut off: what is not complete does not look so
                with contextlib.suppress(ConnectionError):
                    assert not (await reader.read()).endswith(b"0\r\n\r\n")
            if status == 200:
                await app.gone.wait()
                await until(lambda: len(server.connections.served) == 1)
            to_other.write(post("/hot"))
            assert await body_of(other) == b"good"
        await until(lambda: not server.connections.served)
        assert (server.bodies.used, len(server.connections.handed)) == (0, 0)
        assert len(trouble) == 1


class Fallback(asyncio.Protocol):
    """Raises in one of its places, and is told what happens."""

    def __init__(self, where):
        self.where = where
        self.lost = asyncio.Event()
        self.got = b""
        self.trip("made")

    def trip(self, where):
        if where == self.where:
            raise RuntimeError("from a test")

    def connection_made(self, transport):
        self.transport = transport
        self.trip("connection_made")

    def data_received(self, data):
        self.got += data
        self.trip("data_received")

    def connection_lost(self, exc):
        self.lost.set()
        self.trip("connection_lost")


@pytest.mark.parametrize("where", ["made", "connection_made", "data_received", "connection_lost"])
@on_both_loops
async def test_an_exception_of_the_fallback_ends_only_its_connection(where):
    trouble = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: trouble.append(what))
    async with serving(Echo(), lambda: Fallback(where)) as (server, port):
        async with dialled(port) as (other, to_other), dialled(port) as (reader, writer):
            writer.write(post("/cold", b"abc"))
            if where == "connection_lost":
                await until(lambda: bool(server.connections.handed))
                writer.transport.abort()
            else:
                with contextlib.suppress(ConnectionError):
                    said = await reader.read()
                    assert said[:12] == (b"HTTP/1.1 500" if where == "made" else b"")
            to_other.write(post("/hot", b"good"))
            assert await body_of(other) == b"good"
        await until(lambda: not (server.connections.served or server.connections.handed))
        assert server.bodies.used == 0
        assert len(trouble) == 1


@on_both_loops
async def test_a_deadline_that_cannot_be_kept_stops_no_other():
    class Stuck(Wire):
        def abort(self):
            if stuck:
                raise RuntimeError("from a test")

    stuck = True
    trouble = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: trouble.append(what))
    server = HttpServer(Echo(), limits=ServerLimits(idle_s=0.02))
    wires = [Stuck() if number % 2 else Wire() for number in range(20)]
    for wire in wires:
        server().connection_made(wire)
    await until(lambda: all(wire.closing for wire in wires[::2]))
    assert trouble
    stuck = False
    await server.close(0.0)


@on_both_loops
async def test_closing_lets_what_runs_finish():
    app = Echo(lambda request: None)
    async with serving(app) as (server, port):
        async with dialled(port) as (idle, _), dialled(port) as (reader, writer):
            writer.write(post("/hot"))
            await until(lambda: bool(app.requests) and len(server.connections.served) == 2)
            closing = asyncio.ensure_future(server.close(grace_s=10))
            assert await idle.read() == b""
            with pytest.raises(ConnectionError):
                await asyncio.open_connection("127.0.0.1", port)
            assert not closing.done()
            app.requests[0].answer(200, (), b"last")
            assert (await reader.read()).endswith(
                b"connection: close\r\ncontent-length: 4\r\n\r\nlast"
            )
        await closing


@on_both_loops
async def test_closing_does_not_wait_for_ever():
    app = Echo(lambda request: None)
    gone = asyncio.Event()
    async with serving(app) as (server, port), dialled(port) as (reader, writer):
        writer.write(post("/hot"))
        await until(lambda: bool(app.requests))
        app.requests[0].on_disconnect = gone.set
        await server.close(grace_s=0.05)
        assert await reader.read() == b""
        await gone.wait()


@on_both_loops
async def test_tls():
    async with serving(Echo(), ssl=server_tls()) as (_, port):
        pool = Pool(f"https://localhost:{port}", ssl=client_tls())
        for size in (0, 10, 1_000_000):
            assert (await pool.request("POST", "/hot", body=b"x" * size)).body == b"x" * size
        assert (await pool.request("POST", "/cold")).status == 404
        pool.close()


async def cold_app(**options) -> web.AppRunner:
    """An aiohttp application that closes after every answer, as a fallback should."""

    async def echo(request):
        body = await request.read()
        answer = web.Response(body=b"%b %b" % (request.path.encode(), body))
        answer.force_close()
        return answer

    application = web.Application(**options)
    application.router.add_route("*", "/{rest:.*}", echo)
    runner = web.AppRunner(application)
    await runner.setup()
    return runner


@on_both_loops
async def test_other_requests_go_to_the_fallback_with_their_connection():
    runner = await cold_app()
    app = Echo()
    async with serving(app, runner.server) as (server, port):
        for before in (0, 1):
            for whole in (True, False):
                async with dialled(port) as (reader, writer):
                    hot = post("/hot", b"h") * before
                    data = hot + post("/cold", b"c" * 100)
                    writer.write(data if whole else data[:-50])
                    for _ in range(before):
                        assert await body_of(reader) == b"h"
                    await asyncio.sleep(0.01)
                    if not whole:
                        writer.write(data[-50:])
                    assert (await reader.read()).endswith(b"\r\n\r\n/cold " + b"c" * 100)
        assert len(app.requests) == 2
        await until(lambda: not server.connections.served)
    await runner.cleanup()


@on_both_loops
async def test_an_ordinary_client_goes_back_and_forth():
    runner = await cold_app()
    async with serving(Echo(), runner.server) as (_, port), ClientSession() as session:
        for _ in range(3):
            for path, answer in [("/hot", b"x"), ("/cold", b"/cold x")]:
                async with session.post(f"http://127.0.0.1:{port}{path}", data=b"x") as response:
                    assert await response.read() == answer
    await runner.cleanup()


@on_both_loops
async def test_connections_of_the_fallback_count_as_long_as_they_live():
    runner = await cold_app()
    limits = {"max_connections": 1, "idle_s": 0.2, "head_s": 0.2}
    async with serving(Echo(), runner.server, **limits) as (server, port):
        async with dialled(port) as (_, writer):
            writer.write(post("/cold", b"abc")[:-1])
            await until(lambda: bool(server.connections.handed))
            async with dialled(port) as (refused, _):
                assert await status_of(refused) == 503
        await until(lambda: not server.connections.handed)
        async with dialled(port) as (reader, writer):
            writer.write(post("/hot"))
            assert await status_of(reader) == 200
    await runner.cleanup()


@on_both_loops
async def test_nothing_is_left_for_the_garbage_collector():
    def react(request):
        kept = [request]
        request.on_disconnect = request.on_pause = request.on_resume = lambda: kept.clear()
        request.begin(200, ())
        request.write(request.body)
        request.end()

    class Forgetful(Echo):
        def handle(self, request):
            self.react(request)

    async with serving(Forgetful(react)) as (_, port), dialled(port) as (reader, writer):
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                writer.write(post("/hot", b"abc"))
                assert await read_stream(reader) == 3
            assert not [o for o in gc.get_objects() if isinstance(o, ReceivedRequest)]
        finally:
            gc.enable()
