"""Frames over a TCP connection, in order: a link between two processes.

Each frame is preceded by its length in four bytes, most significant byte first. The end of the
connection means that the peer is gone: a process that dies closes it; a machine that vanishes does
not answer the kernel's keepalive probes and is given up after `SILENCE_S`. A process that hangs has
a kernel that still answers the probes, so each end sends empty frames regularly, and a peer that
sends nothing for `STANDS_S` is given up, too.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

from rollout_sched.core.errors import RolloutError

log = logging.getLogger(__name__)

#: Most bytes of a frame, and of all unsent data: with more, the peer has long stopped reading.
MOST_BYTES = 2**30

#: Seconds after which a silent machine counts as gone, and the number of keepalive probes.
SILENCE_S = 15
QUESTIONS = 3

#: Seconds after which a silent process counts as hung, and between two checks.
STANDS_S = 30.0
LOOK_S = 5.0

_LENGTH = 4
_EMPTY = bytes(_LENGTH)


class LinkEnded(RolloutError, RuntimeError):
    """The connection is closed: nothing can be sent."""


class FrameConnection(asyncio.Protocol):
    """One end of a link. `on_frame` is called with each frame, `on_end` once with the reason when
    the connection ends. An error in `on_frame` ends the connection.

    most_bytes  of an incoming frame; a longer one ends the connection
    """

    def __init__(self, on_frame: Callable[[bytes], None], on_end: Callable[[str], None]) -> None:
        self.on_frame = on_frame
        self.on_end = on_end
        self.most_bytes = MOST_BYTES
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
        if len(frame) + transport.get_write_buffer_size() > MOST_BYTES:
            self._abort(f"the peer has not read more than {MOST_BYTES:,} bytes")
            raise LinkEnded(f"the link is closed: {self._why}")
        transport.writelines((len(frame).to_bytes(_LENGTH, "big"), frame))

    def close(self) -> None:
        """Close after the data sent so far."""
        if self._transport is not None:
            self._why = self._why or "closed here"
            self._transport.close()

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
            if length > self.most_bytes:
                self._abort(f"a frame of {length:,} bytes; the peer is no scheduler or front")
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
            except Exception as error:
                log.exception("error while handling a frame")
                self._abort(f"{type(error).__name__}: {error}")
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
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Send an empty frame, and check that the peer has sent something."""
        transport, now = self._transport, asyncio.get_running_loop().time()
        if transport is None or transport.is_closing():
            return
        if now - self._looked > 2 * LOOK_S:
            self._heard = now  # our own loop was blocked: received data may be waiting to be read
        self._looked = now
        if now - self._heard > STANDS_S:
            self._abort(f"nothing received for {STANDS_S:.0f} s")
            return
        transport.write(_EMPTY)
        self._look_later()

    def _abort(self, why: str) -> None:
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()


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
