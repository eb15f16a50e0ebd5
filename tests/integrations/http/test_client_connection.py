"""Answers, whole and broken, as a receiver hears them."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.integrations.http import Exchange, Pool
from rollout_sched.integrations.http.bodies import MAX_CHUNK_LINE
from rollout_sched.integrations.http.client import MAX_BODY
from rollout_sched.integrations.http.client_connection import ClientConnection
from rollout_sched.integrations.http.errors import AnswerBroken
from rollout_sched.integrations.http.heads import MAX_HEAD, MAX_INTERIM, MAX_LINES
from tests.integrations.http.test_bodies import cut, frame
from tests.integrations.http.wires import (
    CHUNKED,
    Heard,
    Wire,
    answering,
    ok,
    on_both_loops,
    pooled,
    read_message,
    repeating,
    scripted,
    until,
)

pytestmark = pytest.mark.real_time


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
async def test_an_answer_ends_where_it_says(method, answer, status, body):
    async with pooled(answering(answer)) as pool:
        got = await pool.request(method, "/", timeout_s=10)
        assert (got.status, got.body, pool.unasked) == (status, body, 0)
        assert len(pool._idle._idle) == 1


@on_both_loops
async def test_an_answer_that_the_close_ends():
    async def peer(reader, writer):
        await read_message(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await writer.drain()
        writer.write(b"def")

    async with pooled(peer) as pool:
        assert (await pool.request("GET", "/")).body == b"abcdef"
        assert (await pool.request("GET", "/")).body == b"abcdef"


@pytest.mark.parametrize("field", [b"connection: close", b"Connection: x, Close"])
async def test_a_connection_that_will_close_is_not_kept(field):
    opened: list[int] = []
    async with pooled(answering(ok(b"", field + b"\r\n"), opened)) as pool:
        await pool.request("GET", "/")
        await pool.request("GET", "/")
        assert len(opened) == 2


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
async def test_a_malformed_answer_is_an_error(answer, why):
    async with scripted(answering(answer)) as url:
        pool = Pool(url)
        with pytest.raises(AnswerBroken, match=why) as error:
            await pool.request("GET", "/", timeout_s=10)
        assert url in str(error.value)
        assert not pool._idle._idle
        pool.close()


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200", ok(b"abc")[:-1], CHUNKED + b"3\r\nabc\r\n", CHUNKED + b"0\r\n", CHUNKED],
)
async def test_an_answer_cut_short_is_an_error(answer):
    async def peer(reader, writer):
        await read_message(reader)
        writer.write(answer)

    async with pooled(peer) as pool:
        heard = Heard()
        pool.send("GET", "/", (), b"", heard)
        await heard.over.wait()
        assert heard.calls.count("error") == 1
        assert heard.calls[-1] == "error"
        assert isinstance(heard.error, AnswerBroken)


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

    async with pooled(peer) as pool:
        heard = Heard()
        pool.send("GET", "/", (), b"", heard)
        await until(lambda: heard.body == b"abc")
        reset.set()
        await heard.over.wait()
        assert heard.calls == ["head", "data", "error"]


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

    async with pooled(peer) as pool:
        first = asyncio.ensure_future(pool.request("POST", "/", body=body))
        await asyncio.sleep(0.01)
        read.set()
        assert (await first).status == 200
        await pool.request("POST", "/", body=body)
        assert [g[-len(body) :] == body for g in got] == [True, True]


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

    async with pooled(peer) as pool:
        assert (await pool.request("POST", "/", body=body)).status == 413
        assert (await pool.request("POST", "/", body=body)).status == 413
        assert len(opened) == 2


def fed(answer: bytes, at: list[int], method: str = "GET", limit: int = MAX_BODY):
    """What a receiver hears of an answer in packets, and then a close."""

    async def run():
        pool = Pool("http://127.0.0.1:1")
        connection, heard = ClientConnection(pool), Heard()
        connection.connection_made(Wire())
        connection.carry(Exchange(b"", b"", method == "HEAD", heard, limit))
        for packet in cut(answer, at):
            connection.data_received(packet)
        over_before = heard.over.is_set()
        connection.connection_lost(None)
        pool.close()
        return heard, over_before, pool.unasked

    return asyncio.run(run())


def test_interim_answers_are_read_in_a_row_and_bounded():
    early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    heard, _, _ = fed(early * MAX_INTERIM + ok(), [])
    assert (heard.status, heard.body) == (200, b"ok")
    for at in ([], list(range(0, 99999, 7))):
        heard, over, _ = fed(early * 5000 + ok(), at)
        assert over
        assert heard.calls == ["error"]
        assert "interim" in str(heard.error)


async def test_every_exchange_may_have_its_interim_answers():
    async with pooled(repeating(b"HTTP/1.1 102 Processing\r\n\r\n" * MAX_INTERIM + ok())) as pool:
        for _ in range(3):
            assert (await pool.request("GET", "/", timeout_s=10)).body == b"ok"


@pytest.mark.parametrize("lines", [MAX_LINES, MAX_LINES + 1, 8000])
@pytest.mark.parametrize("at", [[], [3, 50, 333]])
def test_the_header_lines_of_an_answer_are_bounded(lines, at):
    head = b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * (lines - 1) + b"content-length: 0\r\n\r\n"
    heard, _, _ = fed(head, at)
    assert heard.calls == (["head", "end"] if lines <= MAX_LINES else ["error"])


@pytest.mark.parametrize(
    ("method", "status", "fields", "end"),
    [
        ("GET", 204, b"", "end"),
        ("GET", 204, b"content-length: 0\r\n", "end"),
        ("GET", 204, b"content-length: 3\r\n", "error"),
        ("GET", 204, b"transfer-encoding: chunked\r\n", "error"),
        ("GET", 204, b"content-length: 0\r\ntransfer-encoding: chunked\r\n", "error"),
        ("HEAD", 204, b"content-length: 3\r\n", "error"),
        ("GET", 304, b"content-length: 3\r\n", "end"),  # of the representation (RFC 9110, 8.6)
        ("GET", 304, b"transfer-encoding: chunked\r\n", "end"),  # RFC 9112, 6.1
        ("GET", 304, b"content-length: x\r\n", "error"),
        ("GET", 304, b"content-length: 3\r\ntransfer-encoding: chunked\r\n", "error"),
        ("HEAD", 200, b"content-length: 3\r\ntransfer-encoding: chunked\r\n", "error"),
        ("HEAD", 200, b"content-length: 999999999999999\r\n", "end"),
    ],
)
def test_an_answer_that_contradicts_itself_about_its_body_is_refused(method, status, fields, end):
    heard, over, unasked = fed(b"HTTP/1.1 %d X\r\n%b\r\n" % (status, fields), [], method)
    assert (heard.calls[-1], over, unasked) == (end, True, 0)


@pytest.mark.parametrize("field", [b"content-length: 3", b"transfer-encoding: chunked"])
def test_an_interim_answer_with_a_body_is_refused(field):
    heard, over, _ = fed(b"HTTP/1.1 103 X\r\n%b\r\n\r\n" % field + ok(), [])
    assert (heard.calls, over) == (["error"], True)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n",
        CHUNKED + b"3E9\r\n",
        CHUNKED + b"3e7\r\n" + b"x" * 999 + b"\r\n2\r\n",
        CHUNKED + b"DE0B6B3A7640000\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001,
    ],
)
def test_an_answer_that_announces_too_much_is_not_waited_for(answer):
    heard, over, _ = fed(answer, [], limit=1000)
    assert (heard.calls[-1], over) == ("error", True)
    assert "longer than 1000" in str(heard.error)


EXTENSIONS = st.integers(MAX_CHUNK_LINE - 8, MAX_CHUNK_LINE + 8).map(lambda n: b"1;" + b"e" * n)
HEADS = st.integers(MAX_HEAD - 60, MAX_HEAD - 20).map(
    lambda n: b"HTTP/1.1 200 OK\r\na: " + b"b" * n + b"\r\ncontent-length: 0\r\n\r\n"
)
LINES = st.sampled_from(
    [
        CHUNKED,
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n",
        b"3\r\nabc\r\n",
        b"0\r\n\r\n",
        b"a: b\r\n",
        b"\r\n",
        b"\n",
        b"3",
        b";",
    ]
)


@given(
    st.lists(LINES | EXTENSIONS | HEADS | st.binary(max_size=3), min_size=1, max_size=6).map(
        b"".join
    ),
    st.lists(st.integers(0, 2 * MAX_HEAD), max_size=30),
)
def test_no_split_into_packets_changes_how_an_answer_ends(answer, at):
    def outcome(at):
        heard, over, unasked = fed(answer, at)
        told = (heard.status, heard.headers, [call for call in heard.calls if call != "data"])
        whole = heard.body if "end" in heard.calls else None
        return told, whole, str(heard.error), over, unasked

    assert outcome(at) == outcome([])


def exchanges():
    return {id(o) for o in gc.get_objects() if isinstance(o, Exchange | Heard)}


@on_both_loops
async def test_nothing_is_left_for_the_garbage_collector():
    async with pooled(repeating(CHUNKED + frame([b"abc"]))) as pool:
        await pool.request("GET", "/")
        gc.collect()
        before = exchanges()  # of tests that have failed
        gc.disable()
        try:
            for _ in range(20):
                heard = Heard()
                pool.send("POST", "/", (), b"x", heard)
                await heard.over.wait()
            del heard
            async with asyncio.timeout(60):
                while exchanges() - before:
                    await asyncio.sleep(0.01)  # the loop may still hold the last one
        finally:
            gc.enable()
