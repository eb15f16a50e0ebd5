"""Frames over a TCP connection, in order: a link between two processes.

Each frame is preceded by its length in four bytes, most significant byte first. The end of the
connection means that the peer is gone: a process that dies closes it; a machine that vanishes does
not answer the kernel's keepalive probes and is given up after `SILENCE_S`. A process that hangs has
a kernel that still answers the probes, so each end sends empty frames regularly, and a peer that
sends nothing for `STANDS_S` is given up, too.

Before anything else each end proves to the other that it has the scheduler's key, without sending
it. What follows is neither encrypted nor signed: a peer is known, an attacker on the path between
the two is not kept out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar, cast

import msgspec

from rollout_sched.core.errors import RolloutError

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Most bytes of a frame, and of all unsent data: with more, the peer has long stopped reading.
MAX_BYTES = 2**30

#: Seconds after which a silent machine counts as gone, and the number of keepalive probes.
SILENCE_S = 15
QUESTIONS = 3

#: Seconds after which a silent process counts as hung, and between two checks.
STANDS_S = 30.0
POLL_S = 5.0

_LENGTH = 4
_EMPTY = bytes(_LENGTH)


class LinkEnded(RolloutError, RuntimeError):
    """The connection is closed: nothing can be sent."""


class FrameConnection(asyncio.Protocol):
    """One end of a link. `on_frame` is called with each frame, `on_end` once with the reason when
    the connection ends. An error in `on_frame` ends the connection; all but a
    PermissionError are logged.

    max_bytes  of an incoming frame; a longer one ends the connection
    """

    def __init__(self, on_frame: Callable[[bytes], None], on_end: Callable[[str], None]) -> None:
        self.on_frame = on_frame
        self.on_end = on_end
        self.max_bytes = MAX_BYTES
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._why = ""
        self._heard = self._looked = 0.0
        self._looking: asyncio.TimerHandle | None = None

    def send(self, frame: bytes) -> None:
        """Raises LinkEnded."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise LinkEnded(f"the link is closed: {self._why or 'it was never open'}")
        if len(frame) + transport.get_write_buffer_size() > MAX_BYTES:
            self.abort(f"the peer has not read more than {MAX_BYTES:,} bytes")
            raise LinkEnded(f"the link is closed: {self._why}")
        transport.writelines((len(frame).to_bytes(_LENGTH, "big"), frame))

    def close(self) -> None:
        """Close after the data sent so far."""
        if self._transport is not None:
            self._why = self._why or "closed here"
            self._transport.close()

    def abort(self, why: str) -> None:
        """Close at once."""
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()

    # -- what the event loop says ----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass
        _give_up_the_silent(transport.get_extra_info("socket"))
        self._heard = self._looked = asyncio.get_running_loop().time()
        self._look_later()

    def data_received(self, data: bytes) -> None:
        self._heard = asyncio.get_running_loop().time()
        received = self._received
        received += data
        at = 0
        while len(received) >= at + _LENGTH:
            length = int.from_bytes(received[at : at + _LENGTH], "big")
            if length > self.max_bytes:
                self.abort(f"a frame of {length:,} bytes; the peer is no scheduler or front")
                return
            end = at + _LENGTH + length
            if len(received) < end:
                break
            frame = bytes(received[at + _LENGTH : end])
            at = end
            if not frame:
                continue
            try:
                self.on_frame(frame)
            except PermissionError as error:
                self.abort(str(error))
                return
            except Exception as error:
                log.exception("error while handling a frame")
                self.abort(f"{type(error).__name__}: {error}")
                return
            if self._transport is None or self._transport.is_closing():
                return
        del received[:at]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._looking is not None:
            self._looking.cancel()
        self.on_end(self._why or str(error or "closed by the peer"))

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(POLL_S, self._look)

    def _look(self) -> None:
        """Send an empty frame, and check that the peer has sent something."""
        transport, now = self._transport, asyncio.get_running_loop().time()
        if transport is None or transport.is_closing():
            return
        if now - self._looked > 2 * POLL_S:
            self._heard = now  # our own loop was blocked: received data may be waiting to be read
        self._looked = now
        if now - self._heard > STANDS_S:
            self.abort(f"nothing received for {STANDS_S:.0f} s")
            return
        transport.write(_EMPTY)
        self._look_later()


def _give_up_the_silent(taken: socket.socket | None) -> None:
    """If the system supports it: probe a silent peer, and limit the wait for its answer."""
    if taken is None or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    every_s = SILENCE_S // QUESTIONS
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, QUESTIONS)
    taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


async def listen(
    accept: Callable[[], FrameConnection], address: str, port: int = 0
) -> asyncio.Server:
    """Raises OSError. `accept` creates our end of each connection."""
    return await asyncio.get_running_loop().create_server(accept, address, port)


async def dial(connection: FrameConnection, address: str, port: int) -> None:
    """Raises OSError."""
    await asyncio.get_running_loop().create_connection(lambda: connection, address, port)


# ------------------------------------------------------------------------------------------
# The handshake: Connect from a front, Challenge from its scheduler's process, Response.

#: Seconds in which a new connection must prove that it has the key.
CONNECT_S = 10.0

#: Most bytes of a frame before the peer has proven that it has the key.
CONNECT_BYTES = 4096

_NONCE = 32

Nonce = Annotated[bytes, msgspec.Meta(min_length=_NONCE, max_length=_NONCE)]


class Connect(msgspec.Struct, frozen=True):
    """The first frame of a front. `nonce`: random."""

    front: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    nonce: Nonce


class Challenge(msgspec.Struct, frozen=True):
    """The answer to Connect. `nonce`: random; `proof`: that the scheduler's process has the key."""

    nonce: Nonce
    proof: bytes


class Response(msgspec.Struct, frozen=True):
    """The answer to Challenge. `proof`: that the front has the key."""

    proof: bytes


def prove(key: str, role: Literal["scheduler", "front"], connect: Connect, nonce: bytes) -> bytes:
    """The proof of one end. It has a nonce of each end, so a recorded one is worth nothing, and the
    role, so the other end cannot send it back."""
    message = msgspec.msgpack.encode((role, connect, nonce))
    return hmac.digest(key.encode(), message, "sha256")


def _read(frame: bytes, kind: type[T]) -> T:
    """Raises PermissionError."""
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except msgspec.DecodeError as error:
        raise PermissionError(f"no {kind.__name__}: {error}") from error


# ------------------------------------------------------------------------------------------
# Accepts the connections of fronts in the process of their scheduler.


class LinkedHub(Protocol):
    """The hub that fronts talk to."""

    def connect(self, name: str, send: Callable[[bytes], None]) -> bytes:
        """A front has connected. Returns the Accepted frame."""

    def receive(self, name: str, frame: bytes) -> None: ...

    def disconnect(self, name: str) -> None: ...


class LinkListener:
    """Keeps one connection for each front by name; a second one with its name replaces the first.
    A connection that does not prove that it has `key` gets no data.

    refused  number of connections that ended without that proof
    """

    def __init__(self, hub: LinkedHub, key: str) -> None:
        self.refused = 0
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
        """Raises PermissionError."""
        connect, nonce = _read(frame, Connect), secrets.token_bytes(_NONCE)
        caller.receive = partial(self._check, caller, connect, nonce)
        proof = prove(self._key, "scheduler", connect, nonce)
        caller.send(msgspec.msgpack.encode(Challenge(nonce, proof)))

    def _check(self, caller: _Caller, connect: Connect, nonce: bytes, frame: bytes) -> None:
        """Raises PermissionError."""
        expected = prove(self._key, "front", connect, nonce)
        if not hmac.compare_digest(_read(frame, Response).proof, expected):
            raise PermissionError(f"{connect.front!r} does not have this scheduler's key")
        before = self._fronts.get(connect.front)
        if before is not None:
            self._drop(before, "it has connected again")
        name = connect.front
        caller.admit(name, partial(self._hub.receive, name))
        self._fronts[name] = caller
        caller.connection.send(self._hub.connect(name, caller.send))
        log.info("front %s connected", name)

    def _gone(self, caller: _Caller, why: str) -> None:
        self._callers.discard(caller)
        if not caller.name:
            self.refused += 1
            log.warning("a connection has not become a front's: %s", why)
        self._drop(caller, why)

    def _drop(self, caller: _Caller, why: str) -> None:
        if self._fronts.get(caller.name) is not caller:
            return
        del self._fronts[caller.name]
        log.warning("front %s disconnected: %s", caller.name, why)
        self._hub.disconnect(caller.name)
        caller.connection.close()


class _Caller:
    """A connection; without a name until it has proven that it has the key."""

    def __init__(
        self,
        connect: Callable[[_Caller, bytes], None],
        gone: Callable[[_Caller, str], None],
    ) -> None:
        self.name = ""
        self.receive: Callable[[bytes], None] = partial(connect, self)
        self._gone = gone
        self.connection = FrameConnection(lambda frame: self.receive(frame), self._end)
        self.connection.max_bytes = CONNECT_BYTES
        self._patience = asyncio.get_running_loop().call_later(
            CONNECT_S, self.connection.abort, f"no proof within {CONNECT_S:.0f} s"
        )

    def admit(self, name: str, receive: Callable[[bytes], None]) -> None:
        self._patience.cancel()
        self.name, self.receive = name, receive
        self.connection.max_bytes = MAX_BYTES

    def send(self, frame: bytes) -> None:
        """A frame to a closed connection is dropped; `gone` reports the end."""
        try:
            self.connection.send(frame)
        except LinkEnded as error:
            log.debug("front %s: %s", self.name, error)

    def _end(self, why: str) -> None:
        self._patience.cancel()
        self._gone(self, why)


# ------------------------------------------------------------------------------------------
# Connects a front to the process of its scheduler, and reconnects it after a loss.

#: Seconds between two tries to connect: the first wait, and the longest.
RETRY_S = 0.1
MAX_RETRY_S = 2.0

#: Seconds for the scheduler's process to accept a connection and for the handshake.
ANSWER_S = 10.0


class SchedulerPlace(NamedTuple):
    """Where a scheduler's process listens, and its key, which may change with each start."""

    address: str
    port: int
    key: str


class LinkedFront(Protocol):
    """The front that the scheduler talks to."""

    def connect(self, accepted: bytes, send: Callable[[bytes], None]) -> None: ...

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
                wait_s = min(MAX_RETRY_S, 2 * wait_s)
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
        """Connect and wait for Accepted. Raises OSError, LinkEnded or what `locate` raises."""
        place = await self._locate()
        call = self._call = _Call(self._front, self._name, place.key)
        try:
            await dial(call.connection, place.address, place.port)
            call.hello()
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

    welcomed  done when the front has received Accepted
    over      done when the connection has ended, with the reason
    """

    def __init__(self, front: LinkedFront, name: str, key: str) -> None:
        loop = asyncio.get_running_loop()
        self.welcomed: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[str] = loop.create_future()
        self._front = front
        self._key = key
        self._connect = Connect(name, secrets.token_bytes(_NONCE))
        self._receive = self._challenged
        self.connection = FrameConnection(lambda frame: self._receive(frame), self._end)
        self.connection.max_bytes = CONNECT_BYTES

    def hello(self) -> None:
        """Begin the handshake. Raises LinkEnded."""
        self.connection.send(msgspec.msgpack.encode(self._connect))

    def _challenged(self, frame: bytes) -> None:
        """Raises PermissionError."""
        challenge = _read(frame, Challenge)
        expected = prove(self._key, "scheduler", self._connect, challenge.nonce)
        if not hmac.compare_digest(challenge.proof, expected):
            raise PermissionError("the process at the scheduler's address does not have its key")
        self.connection.max_bytes = MAX_BYTES
        self._receive = self._accepted
        proof = prove(self._key, "front", self._connect, challenge.nonce)
        self.connection.send(msgspec.msgpack.encode(Response(proof)))

    def _accepted(self, frame: bytes) -> None:
        self._front.connect(frame, self._send)
        self._receive = self._front.receive
        self.welcomed.set_result(None)

    def _send(self, frame: bytes) -> None:
        """A frame to a closed connection is dropped; the end is reported by `over`."""
        with contextlib.suppress(LinkEnded):
            self.connection.send(frame)

    def _end(self, why: str) -> None:
        if not self.over.done():
            self.over.set_result(why)
