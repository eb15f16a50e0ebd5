"""Connects a front to the process of its scheduler, and reconnects it after a loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from rollout_sched.link.connection import FrameConnection, LinkEnded, dial
from rollout_sched.link.listener import Hello

log = logging.getLogger(__name__)

#: Seconds between two tries to connect: the first wait, and the longest.
RETRY_S = 0.1
MOST_RETRY_S = 2.0

#: Seconds for the scheduler's process to accept a connection and to answer the hello.
ANSWER_S = 10.0


class SchedulerPlace(NamedTuple):
    """Where a scheduler's process listens, and its key, which may change with each start."""

    address: str
    port: int
    key: str


class LinkedFront(Protocol):
    """The front that the scheduler talks to."""

    def connect(self, welcome: bytes, send: Callable[[bytes], None]) -> None: ...

    def receive(self, frame: bytes) -> None: ...

    def disconnected(self) -> None: ...


class LinkDialler:
    """Keeps `front` connected, under its `name`. `locate` returns the scheduler's place before each
    try; an error in it is logged, and it is called again."""

    def __init__(
        self, front: LinkedFront, name: str, locate: Callable[[], Awaitable[SchedulerPlace]]
    ) -> None:
        self._front = front
        self._name = name
        self._locate = locate
        self._dialling: asyncio.Task[None] | None = None
        self._call: _Call | None = None
        self._said = ""

    def open(self) -> None:
        self._dialling = asyncio.get_running_loop().create_task(self._dial_for_ever())

    def hang_up(self) -> None:
        """Close the connection and dial again: the front is broken and needs a new connection."""
        if self._call is not None:
            self._call.connection.close()

    async def close(self) -> None:
        if self._dialling is not None:
            self._dialling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._dialling

    async def _dial_for_ever(self) -> None:
        wait_s = RETRY_S
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    call = await self._connected()
            except Exception as error:  # whatever the error, the scheduler may be back soon
                self._complain(error)
                await asyncio.sleep(wait_s)
                wait_s = min(MOST_RETRY_S, 2 * wait_s)
                continue
            wait_s, self._said = RETRY_S, ""
            try:
                why = await asyncio.shield(call.over)
            except asyncio.CancelledError:
                call.connection.close()
                raise
            self._front.disconnected()
            log.warning("front %s has lost its scheduler: %s", self._name, why)

    async def _connected(self) -> _Call:
        """Connect and wait for the welcome. Raises OSError, LinkEnded or what `locate` raises."""
        place = await self._locate()
        call = self._call = _Call(self._front)
        try:
            await dial(call.connection, place.address, place.port)
            call.connection.send(msgspec.msgpack.encode(Hello(self._name, place.key)))
            answers: list[asyncio.Future[Any]] = [call.welcomed, call.over]
            await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
            if call.over.done():
                raise LinkEnded(call.over.result())
        except BaseException:
            call.connection.close()
            if call.welcomed.done():
                self._front.disconnected()
            raise
        return call

    def _complain(self, error: Exception) -> None:
        said = f"{type(error).__name__}: {error}"
        if said != self._said:
            log.warning("front %s has no scheduler yet: %s", self._name, said)
            self._said = said


class _Call:
    """A connection to the scheduler's process.

    welcomed  done when the front has received the welcome
    over      done when the connection has ended, with the reason
    """

    def __init__(self, front: LinkedFront) -> None:
        loop = asyncio.get_running_loop()
        self.welcomed: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[str] = loop.create_future()
        self._front = front
        self.connection = FrameConnection(self._frame, self._end)

    def _frame(self, frame: bytes) -> None:
        if self.welcomed.done():
            self._front.receive(frame)
            return
        self._front.connect(frame, self._send)
        self.welcomed.set_result(None)

    def _send(self, frame: bytes) -> None:
        """A frame to a closed connection is dropped; the end is reported by `over`."""
        with contextlib.suppress(LinkEnded):
            self.connection.send(frame)

    def _end(self, why: str) -> None:
        if not self.over.done():
            self.over.set_result(why)
