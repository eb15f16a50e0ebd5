"""Answers, whole and broken, as a receiver hears them."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.integrations.http import AnswerBroken, Exchange, Pool
from rollout_sched.integrations.http.exchange import MAX_HEAD, Connection
from tests.integrations.http.test_bodies import CHUNKS, cut, frame
from tests.integrations.http.wires import (
    Heard,
    Wire,
    ok,
    on_both_loops,
    read_message,
    scripted,
    until,
)

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def answering(answer: bytes, opened: list[int] | None = None):
    """A peer that gives one answer and waits for the client to go."""

    async def peer(reader, writer):
        if opened is not None:
            opened.append(1)
        await read_message(reader)
        writer.write(answer)
        await reader.read()

    return peer


@pytest.mark.parametrize(
    ("method", "answer", "status", "body"),
    [
        ("GET", ok(b"abc"), 200, b"abc"),
        ("GET", ok(b""), 200, b""),
        ("GET", CHUNKED + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: t\r\n\r\n", 200, b"abcde"),
        (
            "GET",
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\na: b\r\n\r\n" + ok(),
            200,
            b"ok",
        ),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        ("GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", 304, b""),
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", 200, b""),
        ("HEAD", CHUNKED, 200, b""),
    ],
)
def test_an_answer_ends_where_it_says(method, answer, status, body):
    async def run():
        async with scripted(answering(answer)) as url:
            pool = Pool(url)
            got = await pool.request(method, "/", timeout_s=10)
            assert (got.status, got.body, pool.unasked) == (status, body, 0)
            assert len(pool._idle) == 1
            pool.close()

    asyncio.run(run())


@on_both_loops
async def test_an_answer_that_the_close_ends():
    async def peer(reader, writer):
        await read_message(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await writer.drain()
        writer.write(b"def")

    async with scripted(peer) as url:
        pool = Pool(url)
        assert (await pool.request("GET", "/")).body == b"abcdef"
        assert (await pool.request("GET", "/")).body == b"abcdef"
        pool.close()


@pytest.mark.parametrize("field", [b"connection: close", b"Connection: x, Close"])
def test_a_connection_that_will_close_is_not_kept(field):
    async def run():
        opened: list[int] = []
        async with scripted(answering(ok(b"", field + b"\r\n"), opened)) as url:
            pool = Pool(url)
            await pool.request("GET", "/")
            await pool.request("GET", "/")
            assert len(opened) == 2
            pool.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "status line"),
        (b"\x16\x03\x01\r\n\r\n", "status line"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "header line"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", "not a number"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", "both"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", "more than one"),
        (CHUNKED + b"zz\r\n", "chunk"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "another protocol"),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * MAX_HEAD, "longer than"),
        (b"x" * (MAX_HEAD + 1), "longer than"),
    ],
)
def test_what_is_no_answer_is_an_error(answer, why):
    async def run():
        async with scripted(answering(answer)) as url:
            pool = Pool(url)
            with pytest.raises(AnswerBroken, match=why) as error:
                await pool.request("GET", "/", timeout_s=10)
            assert url in str(error.value)
            assert not pool._idle
            pool.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200", ok(b"abc")[:-1], CHUNKED + b"3\r\nabc\r\n", CHUNKED + b"0\r\n", CHUNKED],
)
def test_an_answer_cut_short_is_an_error(answer):
    async def peer(reader, writer):
        await read_message(reader)
        writer.write(answer)

    async def run():
        async with scripted(peer) as url:
            pool = Pool(url)
            heard = Heard()
            pool.send("GET", "/", (), b"", heard)
            await heard.over.wait()
            assert heard.calls.count("error") == 1
            assert heard.calls[-1] == "error"
            assert isinstance(heard.error, AnswerBroken)
            pool.close()

    asyncio.run(run())


@on_both_loops
async def test_a_reset_is_no_end():
    reset = asyncio.Event()

    async def peer(reader, writer):
        await read_message(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await reset.wait()
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async with scripted(peer) as url:
        pool = Pool(url)
        heard = Heard()
        pool.send("GET", "/", (), b"", heard)
        await until(lambda: heard.body == b"abc")
        reset.set()
        await heard.over.wait()
        assert heard.calls == ["head", "data", "error"]
        pool.close()


@on_both_loops
async def test_a_body_larger_than_every_buffer_goes_out_whole():
    body = bytes(range(256)) * 65536
    read = asyncio.Event()
    got = []

    async def peer(reader, writer):
        await read.wait()
        got.append(await read_message(reader))
        writer.write(ok())
        got.append(await read_message(reader))
        writer.write(ok())

    async with scripted(peer) as url:
        pool = Pool(url)
        first = asyncio.ensure_future(pool.request("POST", "/", body=body))
        await asyncio.sleep(0.01)
        read.set()
        assert (await first).status == 200
        await pool.request("POST", "/", body=body)
        assert [g[-len(body) :] == body for g in got] == [True, True]
        pool.close()


@on_both_loops
async def test_an_answer_before_the_request_was_taken_is_the_last_on_its_connection():
    body = b"x" * (32 * 1024 * 1024)
    opened: list[int] = []

    async def peer(reader, writer):
        opened.append(1)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(5)

    async with scripted(peer) as url:
        pool = Pool(url)
        assert (await pool.request("POST", "/", body=body)).status == 413
        assert (await pool.request("POST", "/", body=body)).status == 413
        assert len(opened) == 2
        pool.close()


@on_both_loops
async def test_cancelling_closes_the_connection_and_silences_it():
    gone = asyncio.Event()

    async def peer(reader, writer):
        await read_message(reader)
        writer.write(CHUNKED + b"1\r\na\r\n")
        await reader.read()
        gone.set()

    async with scripted(peer) as url:
        pool = Pool(url)
        heard = Heard()
        exchange = pool.send("POST", "/", (), b"", heard)
        await until(lambda: bool(heard.body))
        exchange.cancel()
        exchange.cancel()
        await gone.wait()
        assert heard.calls == ["head", "data"]
        assert exchange.done
        pool.close()


@pytest.mark.parametrize("when", ["head", "data", "end"])
def test_cancelling_from_a_callback(when):
    class Canceller(Heard):
        def on_head(self, status, headers):
            super().on_head(status, headers)
            self.see("head")

        def on_data(self, data):
            super().on_data(data)
            self.see("data")

        def on_end(self):
            super().on_end()
            self.see("end")

        def see(self, what):
            if what == when:
                exchange.cancel()
                self.over.set()

    heard = Canceller()
    exchange: Exchange

    async def run():
        nonlocal exchange
        async with scripted(answering(ok(b"abc"))) as url:
            pool = Pool(url)
            exchange = pool.send("GET", "/", (), b"", heard)
            await heard.over.wait()
            await asyncio.sleep(0.01)
            assert heard.calls == ["head", "data", "end"][: ["head", "data", "end"].index(when) + 1]
            pool.close()

    asyncio.run(run())


@on_both_loops
async def test_a_request_sent_from_on_end_finds_the_connection_free():
    opened: list[int] = []
    second = Heard()

    class Chained(Heard):
        def on_end(self):
            pool.send("GET", "/2", (), b"", second)

    async def peer(reader, writer):
        opened.append(1)
        while True:
            await read_message(reader)
            writer.write(ok())

    async with scripted(peer) as url:
        pool = Pool(url)
        pool.send("GET", "/1", (), b"", Chained())
        await second.over.wait()
        assert (second.body, len(opened)) == (b"ok", 1)
        pool.close()


@on_both_loops
async def test_a_paused_exchange_makes_the_server_wait():
    sent = 0

    async def peer(reader, writer):
        nonlocal sent
        await read_message(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(512):
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with scripted(peer) as url:
        pool = Pool(url)
        heard = Heard()
        exchange = pool.send("GET", "/", (), b"", heard)
        exchange.pause()
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.05)
        assert not heard.body
        assert sent < 512 * 65536
        exchange.resume()
        await heard.over.wait()
        assert len(heard.body) == 512 * 65536
        pool.close()


@on_both_loops
async def test_a_receiver_that_raises_loses_its_connection_only():
    class Broken(Heard):
        def on_data(self, data):
            raise RuntimeError("from a test")

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    async with scripted(answering(ok(b"abc"))) as url:
        pool = Pool(url)
        broken, heard = Broken(), Heard()
        pool.send("GET", "/", (), b"", broken)
        await broken.over.wait()
        assert isinstance(broken.error, AnswerBroken)
        pool.send("GET", "/", (), b"", heard)
        await heard.over.wait()
        assert heard.body == b"abc"
        pool.close()


ANSWERS = st.tuples(st.sampled_from(["length", "chunked"]), CHUNKS)


@given(ANSWERS, st.lists(st.integers(0, 9999), max_size=30), st.booleans())
def test_packets_do_not_matter(answer, at, early):
    framing, chunks = answer
    body = b"".join(chunks)
    data = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" if early else b""
    data += ok(body) if framing == "length" else CHUNKED + frame(chunks)

    async def run():
        pool = Pool("http://127.0.0.1:1")
        connection, heard = Connection(pool), Heard()
        connection.connection_made(Wire())
        connection.carry(Exchange(b"", b"", False, heard))
        for packet in cut(data, at):
            if packet:
                connection.data_received(packet)
        assert (heard.status, heard.body, heard.calls[-1]) == (200, body, "end")
        assert heard.calls.count("end") == heard.calls.count("head") == 1
        assert pool.unasked == 0
        pool.close()

    asyncio.run(run())


@given(st.binary(max_size=200), st.lists(st.integers(0, 999), max_size=5))
def test_any_bytes_end_or_wait(data, at):
    async def run():
        pool = Pool("http://127.0.0.1:1")
        connection, heard = Connection(pool), Heard()
        connection.connection_made(Wire())
        connection.carry(Exchange(b"", b"", False, heard))
        for packet in cut(b"HTTP/1.1 " + data, at):
            connection.data_received(packet)
        connection.connection_lost(None)
        assert heard.calls[-1] in ("end", "error")
        pool.close()

    asyncio.run(run())


@on_both_loops
async def test_nothing_is_left_for_the_garbage_collector():
    async def peer(reader, writer):
        while True:
            await read_message(reader)
            writer.write(CHUNKED + frame([b"abc"]))

    async with scripted(peer) as url:
        pool = Pool(url)
        await pool.request("GET", "/")
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                heard = Heard()
                pool.send("POST", "/", (), b"x", heard)
                await heard.over.wait()
            del heard
            alive = [o for o in gc.get_objects() if isinstance(o, Exchange | Heard)]
            assert not alive
        finally:
            gc.enable()
        pool.close()
