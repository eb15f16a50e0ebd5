"""Frames arrive complete and in order, and every end of a connection is noticed."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from rollout_sched import process as event_loop
from rollout_sched.link import transport as connections
from rollout_sched.link.transport import FrameConnection, LinkEnded, dial, listen
from tests.link.scenes import runs


class End(NamedTuple):
    connection: FrameConnection
    frames: asyncio.Queue[bytes]
    over: asyncio.Future[str]


def end(on_frame: Callable[[bytes], None] | None = None) -> End:
    frames: asyncio.Queue[bytes] = asyncio.Queue()
    over = asyncio.get_running_loop().create_future()
    return End(FrameConnection(on_frame or frames.put_nowait, over.set_result), frames, over)


@asynccontextmanager
async def listening(there: End) -> AsyncIterator[int]:
    server = await listen(lambda: there.connection, "127.0.0.1")
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@asynccontextmanager
async def joined(there: End | None = None) -> AsyncIterator[tuple[End, End]]:
    here, there = end(), there or end()
    async with asyncio.timeout(30), listening(there) as port:
        await dial(here.connection, "127.0.0.1", port)
        yield here, there
        here.connection.close()
        await here.over


@runs
async def test_frames_of_any_length_come_whole_and_in_order() -> None:
    frames = [b"x", bytes(70_000), b"y" * 3_000_000, *(b"%d" % n for n in range(100))]
    async with joined() as (here, there):
        for frame in frames:
            here.connection.send(frame)
        assert [await there.frames.get() for _ in frames] == frames
        there.connection.send(b"back")
        assert await here.frames.get() == b"back"


def test_on_the_event_loop_that_serves() -> None:
    async def scene() -> None:
        async with joined() as (here, there):
            here.connection.send(b"x")
            assert await there.frames.get() == b"x"

    event_loop.run(scene())


@runs
async def test_what_was_sent_before_the_end_arrives() -> None:
    async with joined() as (here, there):
        here.connection.send(bytes(1_000_000))
        here.connection.close()
        assert await there.frames.get() == bytes(1_000_000)
        assert await there.over == "closed by the peer"
        assert await here.over == "closed here"
        with pytest.raises(LinkEnded, match="closed here"):
            here.connection.send(b"late")


@runs
async def test_a_process_that_dies_is_noticed() -> None:
    there = end()
    async with asyncio.timeout(30), listening(there) as port:
        dying = socket.create_connection(("127.0.0.1", port))
        dying.sendall(b"\0\0\0\5ab")
        dying.close()
        assert await there.over
    assert there.frames.empty()


@runs
async def test_what_is_no_frame_ends_it() -> None:
    there = end()
    async with asyncio.timeout(30), listening(there) as port:
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert "no scheduler or front" in await there.over
        stranger.close()


@runs
async def test_what_cannot_be_taken_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(frame: bytes) -> None:
        raise ValueError("no such order")

    async with joined(end(refuse)) as (here, there):
        here.connection.send(b"an order")
        assert await there.over == "ValueError: no such order"
        assert await here.over
    assert "error while handling a frame" in caplog.text


def flood(connection: FrameConnection) -> None:
    """Send everything in one iteration of the event loop, in which nothing else runs."""
    while True:
        connection.send(bytes(2**16))


@runs
async def test_who_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_BYTES", 2**20)
    there = end()
    async with asyncio.timeout(30), joined(there) as (here, _):
        with pytest.raises(LinkEnded, match="has not read"):
            flood(here.connection)
        assert "has not read" in await here.over


@runs
async def test_a_silent_machine_is_asked_whether_it_is_there() -> None:
    async with joined() as (here, _):
        transport = here.connection._transport
        assert transport is not None
        taken = transport.get_extra_info("socket")
        assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        waits_s = taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
        assert waits_s == connections.SILENCE_S


@runs
async def test_nobody_is_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            await dial(end().connection, "127.0.0.1", port)


@runs
async def test_a_process_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel still accepts data and acknowledges it."""
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    monkeypatch.setattr(connections, "STANDS_S", 0.2)
    stands = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    here = end()
    async with asyncio.timeout(30):
        await dial(here.connection, "127.0.0.1", stands.sockets[0].getsockname()[1])
        assert "nothing received" in await here.over
    stands.close()


@runs
async def test_who_has_nothing_to_say_is_there_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    monkeypatch.setattr(connections, "STANDS_S", 0.2)
    async with joined() as (here, there):
        await asyncio.sleep(0.6)
        assert not here.over.done()
        assert there.frames.empty()


@runs
async def test_who_stood_still_itself_reads_first_what_was_said_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    monkeypatch.setattr(connections, "STANDS_S", 0.1)
    async with joined() as (here, _):
        await asyncio.sleep(0.05)
        time.sleep(0.3)
        await asyncio.sleep(0.05)
        assert not here.over.done()
