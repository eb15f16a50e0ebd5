"""Frames arrive complete and in order, and every end of a connection is noticed."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec
import pytest

from rollout_sched import process as event_loop
from rollout_sched.link import transport as connections
from rollout_sched.link import transport as diallers
from rollout_sched.link import transport as listeners
from rollout_sched.link.transport import (
    Connect,
    FrameConnection,
    LinkDialler,
    LinkEnded,
    LinkListener,
    SchedulerPlace,
    dial,
    listen,
)
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
async def test_frames_of_any_length_arrive_intact_and_in_order() -> None:
    frames = [b"x", bytes(70_000), b"y" * 3_000_000, *(b"%d" % n for n in range(100))]
    async with joined() as (here, there):
        for frame in frames:
            here.connection.send(frame)
        assert [await there.frames.get() for _ in frames] == frames
        there.connection.send(b"back")
        assert await here.frames.get() == b"back"


def test_frames_arrive_on_uvloop() -> None:
    async def scene() -> None:
        async with joined() as (here, there):
            here.connection.send(b"x")
            assert await there.frames.get() == b"x"

    event_loop.run(scene())


@runs
async def test_frames_sent_before_close_arrive() -> None:
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
async def test_malformed_frame_ends_the_connection() -> None:
    there = end()
    async with asyncio.timeout(30), listening(there) as port:
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert "no scheduler or front" in await there.over
        stranger.close()


@runs
async def test_failing_handler_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
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
async def test_peer_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_BYTES", 2**20)
    there = end()
    async with asyncio.timeout(30), joined(there) as (here, _):
        with pytest.raises(LinkEnded, match="has not read"):
            flood(here.connection)
        assert "has not read" in await here.over


@runs
async def test_silent_machine_is_probed() -> None:
    async with joined() as (here, _):
        transport = here.connection._transport
        taken = transport.get_extra_info("socket")
        assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        waits_s = taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
        assert waits_s == connections.SILENCE_S


@runs
async def test_unreachable_scheduler_refuses_the_connection() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            await dial(end().connection, "127.0.0.1", port)


@runs
async def test_a_process_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel still accepts data and acknowledges it."""
    monkeypatch.setattr(connections, "POLL_S", 0.02)
    monkeypatch.setattr(connections, "STANDS_S", 0.2)
    stands = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    here = end()
    async with asyncio.timeout(30):
        await dial(here.connection, "127.0.0.1", stands.sockets[0].getsockname()[1])
        assert "nothing received" in await here.over
    stands.close()


@runs
async def test_quiet_peer_stays_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "POLL_S", 0.02)
    monkeypatch.setattr(connections, "STANDS_S", 0.2)
    async with joined() as (here, there):
        await asyncio.sleep(0.6)
        assert not here.over.done()
        assert there.frames.empty()


@runs
async def test_stalled_reader_reads_pending_frames_before_judging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "POLL_S", 0.02)
    monkeypatch.setattr(connections, "STANDS_S", 0.1)
    async with joined() as (here, _):
        await asyncio.sleep(0.05)
        time.sleep(0.3)
        await asyncio.sleep(0.05)
        assert not here.over.done()


class Front:
    """Records its calls."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[str | bytes] = asyncio.Queue()
        self.send: Callable[[bytes], None] = lambda frame: None

    def connect(self, accepted: bytes, send: Callable[[bytes], None]) -> None:
        self.send = send
        self.told.put_nowait(accepted)

    def receive(self, frame: bytes) -> None:
        self.told.put_nowait(frame)

    def disconnected(self) -> None:
        self.told.put_nowait("disconnected")


class Stage:
    """A scheduler's process that starts and stops, and a front that keeps dialling."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.front = Front()
        self.asked = asyncio.Event()
        self.place: SchedulerPlace | None = None
        self._listener: LinkListener | None = None
        self.dialler = LinkDialler(self.front, "f", self._locate)

    async def _locate(self) -> SchedulerPlace:
        self.asked.set()
        if self.place is None:
            raise LookupError("no scheduler of that name")
        return self.place

    async def rise(self) -> None:
        self._listener = LinkListener(self.hub, KEY)
        self.place = SchedulerPlace("127.0.0.1", await self._listener.open("127.0.0.1"), KEY)

    def fall(self) -> None:
        self._listener.close()


@runs
async def test_scheduler_is_found_when_it_starts_and_when_it_moves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()
    front = stage.front
    stage.dialler.open()
    async with asyncio.timeout(30):
        await stage.asked.wait()
        await stage.rise()
        assert await front.told.get() == b"welcome f"
        front.send(b"a report")
        assert await stage.hub.told.get() == ("connect", "f")
        assert await stage.hub.told.get() == ("receive", "f", b"a report")
        stage.fall()
        assert await front.told.get() == "disconnected"
        front.send(b"to nobody")  # not an error: the end was reported
        await stage.rise()
        assert await front.told.get() == b"welcome f"
        stage.hub.sends["f"](b"an order")
        assert await front.told.get() == b"an order"
        await stage.dialler.close()
    stage.fall()
    assert caplog.text.count("no scheduler of that name") == 1


@runs
async def test_a_front_that_cannot_go_on_dials_again() -> None:
    stage = Stage()
    await stage.rise()
    stage.dialler.hang_up()  # no scheduler is there yet
    stage.dialler.open()
    async with asyncio.timeout(30):
        assert await stage.front.told.get() == b"welcome f"
        stage.dialler.hang_up()
        assert await stage.front.told.get() == "disconnected"
        assert await stage.front.told.get() == b"welcome f"
        await stage.dialler.close()
    stage.fall()


@runs
async def test_unanswered_dial_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diallers, "ANSWER_S", 0.05)
    stage = Stage()
    here = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        here.set()
        await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    stage.place = SchedulerPlace("127.0.0.1", server.sockets[0].getsockname()[1], KEY)
    stage.dialler.open()
    async with asyncio.timeout(30):
        await here.wait()
        await stage.rise()
        monkeypatch.setattr(diallers, "ANSWER_S", 10.0)
        assert await stage.front.told.get() == b"welcome f"
        await stage.dialler.close()
    server.close()
    stage.fall()


@runs
async def test_a_wrong_key_is_asked_for_again() -> None:
    stage = Stage()
    await stage.rise()
    assert stage.place is not None
    right = stage.place
    stage.place = right._replace(key="of an earlier start")
    stage.dialler.open()
    async with asyncio.timeout(30):
        await stage.asked.wait()
        stage.place = right
        assert await stage.front.told.get() == b"welcome f"
        await stage.dialler.close()
    stage.fall()


KEY = "the key"


class Hub:
    """Records its calls."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[str, ...] | tuple[str, str, bytes]] = asyncio.Queue()
        self.sends: dict[str, Callable[[bytes], None]] = {}

    def connect(self, name: str, send: Callable[[bytes], None]) -> bytes:
        self.sends[name] = send
        self.told.put_nowait(("connect", name))
        return b"welcome " + name.encode()

    def receive(self, name: str, frame: bytes) -> None:
        if frame == b"nonsense":
            raise ValueError("no such report")
        self.told.put_nowait(("receive", name, frame))

    def disconnect(self, name: str) -> None:
        self.told.put_nowait(("disconnect", name))


class Caller:
    """The bare connection end of a front."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.connection = FrameConnection(self.frames.put_nowait, self.over.set_result)

    async def call(self, port: int, name: str = "f", key: str = KEY) -> None:
        await dial(self.connection, "127.0.0.1", port)
        self.connection.send(msgspec.msgpack.encode(Connect(name, key)))


@asynccontextmanager
async def listening_listener(hub: Hub) -> AsyncIterator[int]:
    listener = LinkListener(hub, KEY)
    port = await listener.open("127.0.0.1")
    try:
        async with asyncio.timeout(30):
            yield port
    finally:
        listener.close()


@runs
async def test_a_front_is_welcomed_heard_and_missed() -> None:
    hub, caller = Hub(), Caller()
    async with listening_listener(hub) as port:
        await caller.call(port)
        assert await caller.frames.get() == b"welcome f"
        hub.sends["f"](b"an order")
        assert await caller.frames.get() == b"an order"
        caller.connection.send(b"a report")
        caller.connection.close()
        told = [await hub.told.get() for _ in range(3)]
        assert told == [("connect", "f"), ("receive", "f", b"a report"), ("disconnect", "f")]
        hub.sends["f"](b"to nobody")  # not an error: the end was reported


@runs
async def test_reconnection_replaces_the_first() -> None:
    hub, first, second = Hub(), Caller(), Caller()
    async with listening_listener(hub) as port:
        await first.call(port)
        await first.frames.get()
        await second.call(port)
        await second.frames.get()
        await first.over
        second.connection.send(b"a report")
        told = [await hub.told.get() for _ in range(4)]
        assert told == [
            ("connect", "f"),
            ("disconnect", "f"),
            ("connect", "f"),
            ("receive", "f", b"a report"),
        ]


@runs
async def test_wrong_key_receives_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub, stranger = Hub(), Caller()
    async with listening_listener(hub) as port:
        await stranger.call(port, key="guessed")
        await stranger.over
        assert stranger.frames.empty()
        assert hub.told.empty()
    assert "does not have this scheduler's key" in caplog.text


@runs
async def test_malformed_or_long_hello_ends_the_connection() -> None:
    hub = Hub()
    async with listening_listener(hub) as port:
        for frame in (b"hello?", bytes(listeners.CONNECT_BYTES + 1)):
            stranger = Caller()
            await dial(stranger.connection, "127.0.0.1", port)
            stranger.connection.send(frame)
            await stranger.over
        assert hub.told.empty()


@runs
async def test_silent_connection_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "CONNECT_S", 0.01)
    hub, silent = Hub(), Caller()
    async with listening_listener(hub) as port:
        await dial(silent.connection, "127.0.0.1", port)
        await silent.over
        assert hub.told.empty()


@runs
async def test_a_report_that_cannot_be_taken_ends_that_front_alone() -> None:
    hub, bad, good = Hub(), Caller(), Caller()
    async with listening_listener(hub) as port:
        await bad.call(port, "bad")
        await good.call(port, "good")
        await good.frames.get()
        bad.connection.send(b"nonsense")
        await bad.over
        good.connection.send(b"a report")
        told = [await hub.told.get() for _ in range(4)]
        assert ("disconnect", "bad") in told
        assert ("receive", "good", b"a report") in told


@runs
async def test_closing_disconnects_every_front() -> None:
    hub, caller = Hub(), Caller()
    async with listening_listener(hub) as port:
        await caller.call(port)
        await caller.frames.get()
    assert await caller.over == "closed by the peer"
