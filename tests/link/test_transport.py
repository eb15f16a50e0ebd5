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
    Challenge,
    Connect,
    FrameConnection,
    LinkDialler,
    LinkEnded,
    LinkListener,
    Response,
    SchedulerPlace,
    dial,
    listen,
    prove,
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


encode = msgspec.msgpack.encode


class Caller:
    """The bare connection end of a front."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.connection = FrameConnection(self.frames.put_nowait, self.over.set_result)

    async def hello(self, port: int, connect: Connect) -> Challenge:
        await dial(self.connection, "127.0.0.1", port)
        self.connection.send(encode(connect))
        return msgspec.msgpack.decode(await self.frames.get(), type=Challenge)

    async def call(self, port: int, name: str = "f", key: str = KEY) -> None:
        connect = Connect(name, bytes(32))
        challenge = await self.hello(port, connect)
        assert challenge.proof == prove(KEY, "scheduler", connect, challenge.nonce)
        self.connection.send(encode(Response(prove(key, "front", connect, challenge.nonce))))


@asynccontextmanager
async def listening_listener(hub: Hub) -> AsyncIterator[tuple[int, LinkListener]]:
    listener = LinkListener(hub, KEY)
    port = await listener.open("127.0.0.1")
    try:
        async with asyncio.timeout(30):
            yield port, listener
    finally:
        listener.close()


@runs
async def test_a_front_is_welcomed_heard_and_missed() -> None:
    hub, caller = Hub(), Caller()
    async with listening_listener(hub) as (port, _):
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
    async with listening_listener(hub) as (port, _):
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


Answer = Callable[[Connect, Challenge], bytes]


def response(role: str, connect: Connect, nonce: bytes, key: str = KEY) -> bytes:
    return encode(Response(prove(key, role, connect, nonce)))


STRANGERS: dict[str, tuple[Answer, str]] = {
    "another key": (
        lambda c, seen: response("front", c, seen.nonce, key="guessed"),
        "does not have this scheduler's key",
    ),
    "no key": (lambda c, seen: encode(Response(b"")), "does not have this scheduler's key"),
    "the scheduler's own proof": (
        lambda c, seen: encode(Response(seen.proof)),
        "does not have this scheduler's key",
    ),
    "a proof for another challenge": (
        lambda c, seen: response("front", c, bytes(32)),
        "does not have this scheduler's key",
    ),
    "a proof for another name": (
        lambda c, seen: response("front", Connect("other", c.nonce), seen.nonce),
        "does not have this scheduler's key",
    ),
    "garbage": (lambda c, seen: b"open sesame", "no Response"),
    "something long": (lambda c, seen: bytes(listeners.CONNECT_BYTES + 1), "a frame of"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
@runs
async def test_without_the_key_nothing_is_received(
    stranger: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the place of a front that has its name, either."""
    answer, why = STRANGERS[stranger]
    hub, front, caller = Hub(), Caller(), Caller()
    async with listening_listener(hub) as (port, listener):
        await front.call(port)
        assert await front.frames.get() == b"welcome f"
        connect = Connect("f", bytes(32))
        challenge = await caller.hello(port, connect)
        caller.connection.send(answer(connect, challenge))
        await caller.over
        assert listener.refused == 1
        assert listener.fronts == ["f"]
        assert caller.frames.empty()
    assert hub.told.get_nowait() == ("connect", "f")
    assert why in caplog.text
    assert "Traceback" not in caplog.text


@runs
async def test_a_recorded_handshake_lets_nobody_in() -> None:
    """It is sent again frame by frame, to the same process."""
    sent: list[bytes] = []
    hub, front = Hub(), Caller()
    async with listening_listener(hub) as (port, listener):
        send = front.connection.send
        front.connection.send = lambda frame: send(sent.append(frame) or frame)
        await front.call(port)
        await front.frames.get()
        recorder = Caller()
        await dial(recorder.connection, "127.0.0.1", port)
        for frame in sent:
            recorder.connection.send(frame)
        await recorder.over
        assert len(sent) == 2
        assert not any(KEY.encode() in frame for frame in sent)
        assert listener.refused == 1


@pytest.mark.parametrize("frame", [b"hello?", bytes(listeners.CONNECT_BYTES + 1)])
@runs
async def test_malformed_or_long_hello_ends_the_connection(frame: bytes) -> None:
    hub, stranger = Hub(), Caller()
    async with listening_listener(hub) as (port, listener):
        await dial(stranger.connection, "127.0.0.1", port)
        stranger.connection.send(frame)
        await stranger.over
        assert listener.refused == 1
    assert hub.told.empty()


@pytest.mark.parametrize("says_hello", [False, True])
@runs
async def test_a_peer_that_does_not_answer_is_dropped(
    monkeypatch: pytest.MonkeyPatch, says_hello: bool
) -> None:
    monkeypatch.setattr(listeners, "CONNECT_S", 0.1)
    hub, silent = Hub(), Caller()
    async with listening_listener(hub) as (port, listener):
        if says_hello:
            await silent.hello(port, Connect("f", bytes(32)))
        else:
            await dial(silent.connection, "127.0.0.1", port)
        await silent.over
        assert listener.refused == 1
    assert hub.told.empty()


class Impostor:
    """Listens where the scheduler's process should be, with another key or none."""

    def __init__(self, answer: Callable[[Connect], bytes]) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._answer = answer

    def accept(self) -> FrameConnection:
        self.connection = FrameConnection(self._frame, lambda why: None)
        return self.connection

    def _frame(self, frame: bytes) -> None:
        self.frames.put_nowait(frame)
        self.connection.send(self._answer(msgspec.msgpack.decode(frame, type=Connect)))


def challenge(role: str, connect: Connect, key: str = KEY) -> bytes:
    return encode(Challenge(bytes(32), prove(key, role, connect, bytes(32))))


IMPOSTORS: dict[str, Callable[[Connect], bytes]] = {
    "another key": lambda connect: challenge("scheduler", connect, key="guessed"),
    "a front's proof": lambda connect: challenge("front", connect),
    "a recorded proof": lambda connect: challenge("scheduler", Connect("f", b"\1" * 32)),
    "the front's own frame": encode,
    "orders at once": lambda connect: b"welcome f",
    "a long frame": lambda connect: bytes(listeners.CONNECT_BYTES + 1),
}


@pytest.mark.parametrize("impostor", IMPOSTORS)
@runs
async def test_a_front_obeys_nobody_without_the_key(impostor: str) -> None:
    """It does not even prove that it has the key itself."""
    there, stage = Impostor(IMPOSTORS[impostor]), Stage()
    server = await listen(there.accept, "127.0.0.1")
    stage.place = SchedulerPlace("127.0.0.1", server.sockets[0].getsockname()[1], KEY)
    stage.dialler.open()
    async with asyncio.timeout(30):
        for _ in range(2):  # it has given up, and tries again
            msgspec.msgpack.decode(await there.frames.get(), type=Connect)
        await stage.rise()
        assert await stage.front.told.get() == b"welcome f"
        await stage.dialler.close()
    while not there.frames.empty():
        msgspec.msgpack.decode(there.frames.get_nowait(), type=Connect)
    server.close()
    stage.fall()


@runs
async def test_a_report_that_cannot_be_taken_ends_that_front_alone() -> None:
    hub, bad, good = Hub(), Caller(), Caller()
    async with listening_listener(hub) as (port, _):
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
    async with listening_listener(hub) as (port, _):
        await caller.call(port)
        await caller.frames.get()
    assert await caller.over == "closed by the peer"
