"""Where fronts connect to the process of their scheduler."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from typing import Annotated, Protocol

import msgspec

from rollout_sched.link.connection import MOST_BYTES, FrameConnection, LinkEnded, listen

log = logging.getLogger(__name__)

#: Seconds in which who connects has to say who it is.
HELLO_S = 10.0

#: Bytes of it at most.
HELLO_BYTES = 4096


class Hello(msgspec.Struct, frozen=True):
    """The first frame of a front. `key`: that of the scheduler's process."""

    front: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    key: str


class LinkedHub(Protocol):
    """What fronts talk to."""

    def connect(self, name: str, send: Callable[[bytes], None]) -> bytes:
        """A front is here. Returns the frame with which it is welcomed."""

    def receive(self, name: str, frame: bytes) -> None: ...

    def disconnect(self, name: str) -> None: ...


class LinkListener:
    """One connection for each front by name: a second one with its name takes the place of the
    first. Whoever does not have `key` is shown nothing."""

    def __init__(self, hub: LinkedHub, key: str) -> None:
        self._hub = hub
        self._key = key
        self._server: asyncio.Server | None = None
        self._callers: set[_Caller] = set()
        self._fronts: dict[str, _Caller] = {}

    @property
    def fronts(self) -> list[str]:
        """Those that are connected."""
        return list(self._fronts)

    async def open(self, address: str, port: int = 0) -> int:
        """The port. Raises OSError."""
        self._server = await listen(self._accept, address, port)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def close(self) -> None:
        """Nobody connects any more; who is connected is let go."""
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
            self._let_go(before, "it has connected again")
        name = caller.name = hello.front
        self._fronts[name] = caller
        caller.receive = lambda frame: self._hub.receive(name, frame)
        caller.connection.most_bytes = MOST_BYTES
        caller.connection.send(self._hub.connect(name, caller.send))
        log.info("front %s is here", name)

    def _gone(self, caller: _Caller, why: str) -> None:
        self._callers.discard(caller)
        self._let_go(caller, why)

    def _let_go(self, caller: _Caller, why: str) -> None:
        if self._fronts.get(caller.name) is not caller:
            return
        del self._fronts[caller.name]
        log.warning("front %s is gone: %s", caller.name, why)
        self._hub.disconnect(caller.name)
        caller.connection.close()


class _Caller:
    """Who has connected; without a name until it has said hello."""

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
        """What is said to who has gone is lost; that it has gone is told elsewhere."""
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
