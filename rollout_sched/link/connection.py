"""Frames over a TCP connection, in order: a link between two processes.

Each frame has its length before it, four bytes, the most significant first. The end of a connection
is the end of who was there: a process that dies closes it, a machine that vanishes does not answer
the kernel's questions and is given up after `SILENCE_S`. A process that stands still has a kernel
that answers for it, so each end sends an empty frame where it has nothing else to say, and one that
is not heard for `STANDS_S` is given up, too.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

from rollout_sched.core.errors import RolloutError

log = logging.getLogger(__name__)

#: Bytes of the longest frame, and of all that is not sent yet: then who is there has long stopped
#: reading.
MOST_BYTES = 2**30

#: Seconds after which a machine that does not answer has vanished; it is asked so many times.
SILENCE_S = 15
QUESTIONS = 3

#: Seconds after which a process that says nothing is taken to stand still, and between two looks.
STANDS_S = 30.0
LOOK_S = 5.0

_LENGTH = 4
_EMPTY = bytes(_LENGTH)


class LinkEnded(RolloutError, RuntimeError):
    """The connection is over: nothing can be sent."""


class FrameConnection(asyncio.Protocol):
    """One end. `on_frame` is called with each frame, `on_end` once with why it is over, however it
    ends. What raises in `on_frame` ends the connection.

    most_bytes  of a frame that comes; a longer one ends the connection
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
            raise LinkEnded(f"the link is over: {self._why or 'it was never open'}")
        if len(frame) + transport.get_write_buffer_size() > MOST_BYTES:
            self._abort(f"more than {MOST_BYTES:,} bytes have not been read there")
            raise LinkEnded(f"the link is over: {self._why}")
        transport.writelines((len(frame).to_bytes(_LENGTH, "big"), frame))

    def close(self) -> None:
        """What was sent goes out first."""
        if self._transport is not None:
            self._why = self._why or "closed here"
            self._transport.close()

    # -- what the event loop says ----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
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
                self._abort(f"a frame of {length:,} bytes; what is there is no scheduler or front")
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
                log.exception("a frame could not be taken")
                self._abort(f"{type(error).__name__}: {error}")
                return
            if self._transport is None or self._transport.is_closing():
                return
        del received[:at]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._looking is not None:
            self._looking.cancel()
        self.on_end(self._why or str(error or "closed there"))

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Say that we are here, and whether who is there has said so."""
        transport, now = self._transport, asyncio.get_running_loop().time()
        if transport is None or transport.is_closing():
            return
        if now - self._looked > 2 * LOOK_S:
            self._heard = now  # we stood still ourselves: what was said meanwhile is yet to be read
        self._looked = now
        if now - self._heard > STANDS_S:
            self._abort(f"nothing was heard for {STANDS_S:.0f} s")
            return
        transport.write(_EMPTY)
        self._look_later()

    def _abort(self, why: str) -> None:
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()


def _give_up_the_silent(taken: socket.socket | None) -> None:
    """Where the system can: ask who says nothing, and wait for no answer without end."""
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
    """Raises OSError. `accept` makes the end of each that connects."""
    return await asyncio.get_running_loop().create_server(accept, address, port)


async def dial(connection: FrameConnection, address: str, port: int) -> None:
    """Raises OSError."""
    await asyncio.get_running_loop().create_connection(lambda: connection, address, port)
