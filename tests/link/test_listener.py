"""Connections to a scheduler's process: accepted, refused and ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from rollout_sched.link import transport as listeners
from rollout_sched.link.transport import FrameConnection, Hello, LinkListener, dial
from tests.link.scenes import runs

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
        self.connection.send(msgspec.msgpack.encode(Hello(name, key)))


@asynccontextmanager
async def listening(hub: Hub) -> AsyncIterator[int]:
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
    async with listening(hub) as port:
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
async def test_who_connects_again_takes_the_place_of_the_first() -> None:
    hub, first, second = Hub(), Caller(), Caller()
    async with listening(hub) as port:
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
async def test_who_does_not_have_the_key_is_shown_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub, stranger = Hub(), Caller()
    async with listening(hub) as port:
        await stranger.call(port, key="guessed")
        await stranger.over
        assert stranger.frames.empty()
        assert hub.told.empty()
    assert "does not have this scheduler's key" in caplog.text


@runs
async def test_what_is_no_hello_or_too_long_ends_it() -> None:
    hub = Hub()
    async with listening(hub) as port:
        for frame in (b"hello?", bytes(listeners.HELLO_BYTES + 1)):
            stranger = Caller()
            await dial(stranger.connection, "127.0.0.1", port)
            stranger.connection.send(frame)
            await stranger.over
        assert hub.told.empty()


@runs
async def test_who_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "HELLO_S", 0.01)
    hub, silent = Hub(), Caller()
    async with listening(hub) as port:
        await dial(silent.connection, "127.0.0.1", port)
        await silent.over
        assert hub.told.empty()


@runs
async def test_a_report_that_cannot_be_taken_ends_that_front_alone() -> None:
    hub, bad, good = Hub(), Caller(), Caller()
    async with listening(hub) as port:
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
async def test_when_it_closes_every_front_is_let_go() -> None:
    hub, caller = Hub(), Caller()
    async with listening(hub) as port:
        await caller.call(port)
        await caller.frames.get()
    assert await caller.over == "closed by the peer"
