"""Accepts the connections of fronts in the process of their scheduler."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from typing import Annotated, Protocol

import msgspec

from rollout_sched.link.connection import MOST_BYTES, FrameConnection, LinkEnded, listen

log = logging.getLogger(__name__)

#: Seconds in which a new connection must send its hello.
HELLO_S = 10.0

#: Most bytes of the hello.
HELLO_BYTES = 4096


class Hello(msgspec.Struct, frozen=True):
    """The first frame of a front. `key`: the key of the scheduler's process."""

    front: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    key: str


class LinkedHub(Protocol):
    """The hub that fronts talk to."""

    def connect(self, name: str, send: Callable[[bytes], None]) -> bytes:
        """A front has connected. Returns the welcome frame."""

    def receive(self, name: str, frame: bytes) -> None: ...

    def disconnect(self, name: str) -> None: ...


class LinkListener:
    """Keeps one connection for each front by name; a second one with its name replaces the first.
    A connection without the right `key` gets no data."""

    def __init__(self, hub: LinkedHub, key: str) -> None:
        self._hub = hub
        self._key = key
        self._server: asyncio.Server | None = None
        self._callers: set[_Caller] = set()
        self._fronts: dict[str, _Caller] = {}

    @property
    def fronts(self) -> list[str]:
        """The names of the connected fronts."""
        return list(self._fronts)

    async def open(self, address: str, port: int = 0) -> int:
        """Start to listen; returns the port. Raises OSError."""
        self._server = await listen(self._accept, address, port)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def close(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None:
            self._server.close()
        for caller in list(self._callers):
            caller.connection.close()

    def _accept(self) -> FrameConnection:
        caller = _Caller(self._hello, self._gone)
        self._callers.add(caller)
        return caller.connection

    def _hello(self, caller: _Caller, frame: bytes) -> None:
        """Raises msgspec.DecodeError, or PermissionError."""
        hello = msgspec.msgpack.decode(frame, type=Hello)
        if not hmac.compare_digest(hello.key.encode(), self._key.encode()):
            raise PermissionError(f"{hello.front!r} does not have this scheduler's key")
        before = self._fronts.get(hello.front)
        if before is not None:
            self._drop(before, "it has connected again")
        name = caller.name = hello.front
        self._fronts[name] = caller
        caller.receive = lambda frame: self._hub.receive(name, frame)
        caller.connection.most_bytes = MOST_BYTES
        caller.connection.send(self._hub.connect(name, caller.send))
        log.info("front %s connected", name)

    def _gone(self, caller: _Caller, why: str) -> None:
        self._callers.discard(caller)
        self._drop(caller, why)

    def _drop(self, caller: _Caller, why: str) -> None:
        if self._fronts.get(caller.name) is not caller:
            return
        del self._fronts[caller.name]
        log.warning("front %s disconnected: %s", caller.name, why)
        self._hub.disconnect(caller.name)
        caller.connection.close()


class _Caller:
    """A connection; without a name until it has sent its hello."""

    def __init__(
        self,
        hello: Callable[[_Caller, bytes], None],
        gone: Callable[[_Caller, str], None],
    ) -> None:
        self.name = ""
        self.receive: Callable[[bytes], None] = lambda frame: hello(self, frame)
        self._gone = gone
        self.connection = FrameConnection(self._frame, self._end)
        self.connection.most_bytes = HELLO_BYTES
        self._patience = asyncio.get_running_loop().call_later(HELLO_S, self.connection.close)

    def send(self, frame: bytes) -> None:
        """A frame to a closed connection is dropped; `gone` reports the end."""
        try:
            self.connection.send(frame)
        except LinkEnded as error:
            log.debug("front %s: %s", self.name, error)

    def _frame(self, frame: bytes) -> None:
        self._patience.cancel()
        self.receive(frame)

    def _end(self, why: str) -> None:
        self._patience.cancel()
        self._gone(self, why)
