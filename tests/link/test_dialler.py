"""A front finds its scheduler, and finds it again after a loss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rollout_sched.link import transport as diallers
from rollout_sched.link.transport import LinkDialler, LinkListener, SchedulerPlace
from tests.link.scenes import runs
from tests.link.test_listener import KEY, Hub


class Front:
    """Records its calls."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[str | bytes] = asyncio.Queue()
        self.send: Callable[[bytes], None] = lambda frame: None

    def connect(self, welcome: bytes, send: Callable[[bytes], None]) -> None:
        self.send = send
        self.told.put_nowait(welcome)

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
        assert self._listener is not None
        self._listener.close()


@runs
async def test_it_is_found_whenever_it_comes_and_again_elsewhere(
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
async def test_who_does_not_answer_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
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
