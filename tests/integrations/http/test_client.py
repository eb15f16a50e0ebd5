"""The pool against scripted servers on real sockets: keeping, dropping and redialling."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from rollout_sched.integrations.http import (
    Exchange,
    ExchangeError,
    NotConnected,
    Pool,
    client_connection,
)
from rollout_sched.integrations.http import client as client_module
from rollout_sched.integrations.http.client import MAX_BODY, MAX_OPENINGS, Origin
from rollout_sched.integrations.http.client_connection import ClientConnection
from rollout_sched.integrations.http.errors import AnswerBroken
from tests import virtual_loop
from tests.integrations.http.wires import (
    Heard,
    Wire,
    client_tls,
    ok,
    on_both_loops,
    pooled,
    read_message,
    scripted,
    server_tls,
    until,
)

pytestmark = pytest.mark.real_time


class Connections:
    """A peer that keeps its connections alive and counts; `answers` go out one per request."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.messages: list[bytes] = []
        self.opened = 0
        self.closed = 0

    async def __call__(self, reader, writer):
        self.opened += 1
        try:
            while True:
                self.messages.append(await read_message(reader))
                writer.write(self.answers.pop(0) if self.answers else ok())
        finally:
            self.closed += 1


@on_both_loops
async def test_a_request_and_its_answer():
    peer = Connections(ok(b"abc", b"X-One: 1\r\n"))
    async with scripted(peer) as url:
        pool = Pool(url + "/base/")
        answer = await pool.request("POST", "/v1?a=b", [(b"x-two", b"2")], b"body", timeout_s=5)
        assert answer == (200, [(b"x-one", b"1"), (b"content-length", b"3")], b"abc")
        host = url.removeprefix("http://")
        assert peer.messages == [
            f"POST /base/v1?a=b HTTP/1.1\r\nhost: {host}\r\nx-two: 2\r\n"
            "content-length: 4\r\n\r\nbody".encode()
        ]
        pool.close()


@on_both_loops
async def test_a_connection_is_kept_and_the_last_one_used_goes_first():
    peer = Connections()
    async with scripted(peer) as url:
        pool = Pool(url)
        await asyncio.gather(pool.request("GET", "/1"), pool.request("GET", "/2"))
        assert peer.opened == 2
        for _ in range(3):
            await pool.request("GET", "/3")
        assert peer.opened == 2
        pool.close()
        await until(lambda: peer.closed == 2)


@on_both_loops
async def test_an_idle_connection_is_closed_before_the_server_would():
    peer = Connections()
    async with pooled(peer, keepalive_s=0.02) as pool:
        await asyncio.gather(pool.request("GET", "/1"), pool.request("GET", "/2"))
        await until(lambda: peer.closed == 2)
        await pool.request("GET", "/")
        assert peer.opened == 3


@on_both_loops
async def test_a_connection_that_the_server_closed_while_idle_is_not_used():
    closed = asyncio.Event()
    opened = 0

    async def peer(reader, writer):
        nonlocal opened
        opened += 1
        await read_message(reader)
        writer.write(ok())
        writer.close()
        closed.set()

    async with pooled(peer) as pool:
        for expected in (1, 2, 3):
            closed.clear()
            assert (await pool.request("POST", "/")).status == 200
            await closed.wait()
            assert opened == expected


@on_both_loops
async def test_a_connection_closed_as_it_is_reused_is_tried_once_more_afresh():
    attempts: list[bytes] = []

    async def peer(reader, writer):
        attempts.append(await read_message(reader))
        writer.write(ok(b"%d" % len(attempts)))
        attempts.append(await read_message(reader))  # and close

    async with pooled(peer) as pool:
        assert (await pool.request("POST", "/", body=b"1")).body == b"1"
        assert (await pool.request("POST", "/", body=b"2")).body == b"3"
        assert attempts[1] == attempts[2]


@on_both_loops
async def test_the_fresh_connection_is_the_last_try():
    attempts: list[bytes] = []

    async def peer(reader, writer):
        attempts.append(await read_message(reader))
        if len(attempts) == 1:
            writer.write(ok())
            attempts.append(await read_message(reader))

    async with pooled(peer) as pool:
        await pool.request("POST", "/")
        with pytest.raises(AnswerBroken, match="before the answer"):
            await pool.request("POST", "/")
        assert len(attempts) == 3


@pytest.mark.parametrize(
    ("answer", "race_s"), [(b"H", None), (b"HTTP/1.1 100 Continue\r\n\r\n", None), (b"", 0.0)]
)
async def test_a_request_that_was_seen_or_worked_on_for_long_is_not_sent_again(
    answer, race_s, monkeypatch
):
    if race_s is not None:
        monkeypatch.setattr(client_connection, "RACE_S", race_s)
    attempts: list[bytes] = []

    async def peer(reader, writer):
        attempts.append(await read_message(reader))
        writer.write(ok())
        attempts.append(await read_message(reader))
        writer.write(answer)

    async with pooled(peer) as pool:
        await pool.request("POST", "/")
        with pytest.raises(AnswerBroken):
            await pool.request("POST", "/", timeout_s=10)
        assert len(attempts) == 2


@on_both_loops
async def test_a_server_that_answers_twice_at_once_is_dropped():
    peer = Connections(ok(b"1") + ok(b"again"))
    async with pooled(peer) as pool:
        assert (await pool.request("POST", "/")).body == b"1"
        assert pool.unasked == 1
        assert (await pool.request("POST", "/")).body == b"ok"
        assert (peer.opened, pool.unasked) == (2, 1)


@on_both_loops
async def test_a_server_that_answers_again_later_is_dropped():
    again = asyncio.Event()

    async def peer(reader, writer):
        await read_message(reader)
        writer.write(ok(b"1"))
        await again.wait()
        writer.write(ok(b"again"))
        await reader.read()

    async with pooled(peer) as pool:
        assert (await pool.request("POST", "/")).body == b"1"
        again.set()
        await until(lambda: pool.unasked == 1)
        assert (await pool.request("POST", "/")).body == b"1"


@on_both_loops
async def test_a_second_answer_that_was_not_read_yet_does_not_meet_the_next_request():
    go, gone = threading.Event(), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def peer():
        with listener.accept()[0] as first:
            first.recv(65536)
            first.sendall(ok(b"1"))
            go.wait(10)
            first.sendall(ok(b"again"))
            gone.set()
            with listener.accept()[0] as second:
                second.recv(65536)
                second.sendall(ok(b"2"))
                second.recv(1)

    thread = threading.Thread(target=peer, daemon=True)
    thread.start()
    pool = Pool(f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert (await pool.request("POST", "/")).body == b"1"
    go.set()
    gone.wait(10)  # blocks the loop: what has arrived meanwhile cannot have been read
    assert (await pool.request("POST", "/")).body == b"2"
    assert pool.unasked == 1
    pool.close()
    await asyncio.to_thread(thread.join, 10)
    listener.close()


@on_both_loops
async def test_a_closed_port_is_not_connected():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pool = Pool(f"http://127.0.0.1:{port}")
    with pytest.raises(NotConnected, match=f"{pool.url}: no connection"):
        await pool.request("GET", "/")
    heard = Heard()
    exchange = pool.send("GET", "/", (), b"", heard)
    assert not heard.calls  # errors too come later
    await heard.over.wait()
    assert heard.calls == ["error"]
    assert exchange.done
    pool.close()


@on_both_loops
async def test_a_connection_that_does_not_come_about():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        fillers = []
        for _ in range(4):  # the kernel drops what the backlog does not hold
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(address)
            fillers.append(filler)
        pool = Pool(f"http://127.0.0.1:{address[1]}", connect_s=0.05)
        with pytest.raises(NotConnected, match=r"within 0\.05 s"):
            await pool.request("GET", "/")
        pool.close()
        for filler in fillers:
            filler.close()


@on_both_loops
async def test_a_name_that_does_not_resolve():
    pool = Pool("http://" + "a" * 64 + ".invalid:1")
    with pytest.raises(NotConnected):
        await pool.request("GET", "/")
    pool.close()


@on_both_loops
async def test_a_server_that_closes_each_connection_at_once():
    async def peer(reader, writer):
        pass

    async with pooled(peer) as pool:
        with pytest.raises(ExchangeError):
            await pool.request("GET", "/", timeout_s=10)


@on_both_loops
async def test_tls():
    peer = Connections()
    async with scripted(peer, ssl=server_tls()) as url:
        pool = Pool(url, ssl=client_tls())
        for _ in range(3):
            assert (await pool.request("POST", "/", body=b"x" * 100_000)).body == b"ok"
        assert peer.opened == 1
        pool.close()


@on_both_loops
async def test_a_certificate_that_is_not_trusted():
    async with scripted(Connections(), ssl=server_tls()) as url:
        pool = Pool(url)
        with pytest.raises(NotConnected, match=r"(?i)certificate"):
            await pool.request("GET", "/")
        pool.close()


@on_both_loops
async def test_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    peer = Connections()
    async with scripted(peer, host="::1") as url:
        pool = Pool(url)
        assert (await pool.request("GET", "/")).status == 200
        assert f"host: {url.removeprefix('http://')}".encode() in peer.messages[0]
        pool.close()


@on_both_loops
async def test_a_timeout_closes_the_connection():
    gone = asyncio.Event()

    async def peer(reader, writer):
        await read_message(reader)
        await reader.read()
        gone.set()

    async with pooled(peer) as pool:
        with pytest.raises(TimeoutError):
            await pool.request("GET", "/", timeout_s=0.02)
        await gone.wait()


@on_both_loops
async def test_a_connection_cut_off_just_as_it_comes_about_ends_its_exchange():
    async def peer(reader, writer):
        await reader.read()

    async with pooled(peer) as pool:
        for paused in (False, True):
            heard = Heard()
            exchange = pool.send("GET", "/", (), b"", heard)
            if paused:
                exchange.pause()
            while not pool._connections:
                await asyncio.sleep(0)
            for task in pool._dialling:  # as the time limit does, if the loop comes to it late
                task.cancel()
            await heard.over.wait()
            await until(lambda: not (pool._connections or pool._dialling))
            assert heard.calls == ["error"]


@on_both_loops
async def test_closing_ends_everything_with_an_error():
    running = asyncio.Event()

    async def peer(reader, writer):
        await read_message(reader)
        running.set()
        await reader.read()

    async with scripted(peer) as url:
        pool = Pool(url)
        first = asyncio.ensure_future(pool.request("GET", "/runs"))
        await running.wait()
        others = [asyncio.ensure_future(pool.request("GET", f"/{i}")) for i in range(3)]
        await asyncio.sleep(0)
        pool.close()
        results = await asyncio.gather(first, *others, return_exceptions=True)
        assert [type(r) for r in results] == [AnswerBroken] + [NotConnected] * 3
        with pytest.raises(RuntimeError, match="closed"):
            await pool.request("GET", "/")


@on_both_loops
async def test_an_answer_too_long_to_be_kept():
    async with pooled(Connections(ok(b"x" * 1000)), max_answer=999) as pool:
        with pytest.raises(AnswerBroken, match="longer than 999"):
            await pool.request("GET", "/")


@on_both_loops
async def test_an_answer_that_a_receiver_finds_too_long_ends_its_exchange():
    peer = Connections(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1000)
    async with pooled(peer) as pool:
        small = client_module._Whole(asyncio.get_running_loop().create_future(), 3)
        exchange = pool.send("GET", "/", (), b"", small)
        with pytest.raises(AnswerBroken, match="longer than 3 bytes"):
            await small.future
        assert exchange.done
        await until(lambda: peer.closed == 1)


async def test_requests_that_would_break_out_of_their_line_are_refused():
    pool = Pool("http://127.0.0.1:1")
    for method, target, headers in [
        ("GET", "/ HTTP/1.1\r\nx: y", ()),
        ("GET", "/a b", ()),
        ("GET", "relative", ()),
        ("G T", "/", ()),
        ("GET", "/caf\u00e9", ()),
        ("GET", "/\x7f", ()),
        ("GET", "/", [(b"a", b"b\r\nc: d")]),
    ]:
        with pytest.raises(ValueError, match=r"request line|line break"):
            pool.send(method, target, headers, b"", Heard())
    pool.close()


# -- Which idle connection is used, and when the others are closed --

KEEPALIVE_S = 4.0


class Open(Wire):
    """A transport whose socket has nothing to be read, until the other side closes."""

    def __init__(self) -> None:
        super().__init__()
        self._socket.close()
        self._socket, self.other = socket.socketpair()

    def abort(self):
        super().abort()
        self.other.close()


def idle(pool: Pool) -> tuple[ClientConnection, Open]:
    """A new connection that nobody has asked for, so that it is idle at once."""
    connection, wire = ClientConnection(pool), Open()
    connection.connection_made(wire)
    return connection, wire


def sent() -> Exchange:
    return Exchange(b"GET / HTTP/1.1\r\n\r\n", b"", False, Heard(), MAX_BODY)


def on_a_virtual_loop(test):
    """Run `test(connections, pool)` with the idle connections of a pool."""

    def run():
        async def scene():
            pool = Pool("http://127.0.0.1:1", keepalive_s=KEEPALIVE_S)
            await test(pool._idle, pool)
            pool.close()

        virtual_loop.run(scene())

    return run


@on_a_virtual_loop
async def test_connections_are_closed_when_idle_too_long(connections, pool):
    _, first = idle(pool)
    await asyncio.sleep(3.0)
    forgotten, left = idle(pool)
    _, last = idle(pool)
    connections.forget(forgotten)
    await asyncio.sleep(1.5)
    assert [wire.closing for wire in (first, left, last)] == [True, False, False]
    await asyncio.sleep(3.0)
    assert [wire.closing for wire in (first, left, last)] == [True, False, True]


@on_a_virtual_loop
async def test_an_expired_connection_is_not_used_though_its_timer_is_late(connections, pool):
    _, wire = idle(pool)
    connections.close()  # no timer
    await asyncio.sleep(KEEPALIVE_S)
    assert not connections.carry(sent())
    assert wire.closing


# -- Base URLs, and how the requests to them begin --


@pytest.mark.parametrize(
    "url", ["ftp://x", "127.0.0.1:80", "http://", "http://a/?q", "http://u:p@a", "http://a/#f"]
)
def test_a_base_url_is_checked(url):
    with pytest.raises(ValueError, match="URL"):
        Pool(url)


@pytest.mark.parametrize(
    ("url", "host", "port", "secure"),
    [
        ("http://a", "a", 80, False),
        ("https://a", "a", 443, True),
        ("https://[::1]:9/b/", "::1", 9, True),
    ],
)
def test_a_base_url_gives_host_port_and_tls(url, host, port, secure):
    origin = Origin(url, client_tls() if secure else None)
    assert (origin.host, origin.port, origin.ssl is not None) == (host, port, secure)


def test_the_base_path_is_put_before_every_target():
    origin = Origin("http://a:9/base/", None)
    for _ in range(2):
        assert origin.opening("GET", "/x?y") == b"GET /base/x?y HTTP/1.1\r\nhost: a:9\r\n"


def test_openings_kept_ready_are_bounded():
    origin = Origin("http://a", None)
    for i in range(MAX_OPENINGS + 5):
        assert origin.opening("GET", f"/{i}").startswith(b"GET /%d " % i)
    assert len(origin._openings) <= MAX_OPENINGS
