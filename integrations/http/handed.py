"""A connection whose request somebody else reads and answers: the limits stay ours.

Invariants:
- the fallback gets one request, to its last byte, and nothing after it;
- as long as the request is being read it keeps to the server's rate and size, and what it brings
  counts as a body that is here until the connection is closed;
- the answer may take its time, but not the client to take it.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

from rollout_sched.integrations.http.bodies import Body, Chunked, Length
from rollout_sched.integrations.http.errors import RAISED, Malformed, report
from rollout_sched.integrations.http.heads import CHUNKED

#: Seconds for which a refused client may go on sending before its connection is cut. Closed at
#: once, the kernel would answer what it sends with a reset, which can overtake our refusal.
LINGER_S = 2.0


class Bounds(Protocol):
    """What a handed connection asks of the server."""

    bodies: int
    handed: set[Handed]
    max_bodies: int
    max_body: int
    now: float
    stall_s: float

    def full(self) -> Malformed: ...

    def put_off(self, deadline: float, size: int) -> float: ...


class Handed(asyncio.Protocol):
    """Passes what happens on a connection on to `fallback`. `length` is of the request's body.

    `deadline` is the loop time until which we wait for the client.
    """

    def __init__(
        self,
        server: Bounds,
        fallback: asyncio.Protocol,
        transport: asyncio.Transport,
        length: int,
    ) -> None:
        self._server = server
        self._fallback = fallback
        self._transport = transport
        self._body: Body | None  # None when no more of the request is passed on
        if length == CHUNKED:
            self._body = Chunked(server.max_body, fair=True)
        else:
            self._body = Length(length)  # whether it is too long is for the fallback to say
        self._held = 0
        self._throttled = False  # the client does not read for now
        self._unsent = 0  # bytes it had to read when we last looked
        self.deadline = server.now + server.stall_s

    def begin(self, head: bytes, rest: bytes, throttled: bool) -> None:
        """Pass on what has arrived: a head, and what came after it."""
        try:
            self._fallback.connection_made(self._transport)
            if throttled:
                self.pause_writing()
        except RAISED as error:
            self._cut(error)
            return
        self._pass(head)
        self.data_received(rest)

    def data_received(self, data: bytes) -> None:
        if self._body is None or self._transport.is_closing():
            return
        try:
            payload, rest = self._body.feed(data)
        except Malformed:  # for the fallback to answer
            self._pass(data)
            self._stop()
            return
        server = self._server
        if server.bodies + len(payload) > server.max_bodies:
            server.full()
            self.drop()
            return
        self._held += len(payload)
        server.bodies += len(payload)
        self._pass(data[: len(data) - len(rest or b"")])
        if self._held > server.max_body:
            self._stop()
        elif rest is not None:
            self._body = None
            self._wait()
        elif not self._throttled:
            self.deadline = server.put_off(self.deadline, len(payload))

    def eof_received(self) -> bool | None:
        return self._fallback.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.handed.discard(self)
        self._server.bodies -= self._held
        self._held = 0
        self._fallback.connection_lost(exc)

    def pause_writing(self) -> None:
        self._throttled = True
        self._unsent = self._transport.get_write_buffer_size()
        self._wait()
        self._fallback.pause_writing()

    def resume_writing(self) -> None:
        self._throttled = False
        self._wait()
        self._fallback.resume_writing()

    def expire(self) -> None:
        """The deadline has passed."""
        unsent = self._transport.get_write_buffer_size()
        slow = self._throttled and unsent < self._unsent
        unasked = self._body is not None and not self._transport.is_reading()
        if slow or (unasked and not self._throttled):  # not stuck, or not the client's fault
            self._unsent = unsent
            self._wait()
        else:
            self.drop()

    def drop(self) -> None:
        self._transport.abort()

    def _wait(self) -> None:
        """Set the deadline of the state we are in."""
        waiting = self._throttled or self._body is not None
        self.deadline = self._server.now + self._server.stall_s if waiting else math.inf

    def _stop(self) -> None:
        """Too much, or no body at all: the fallback may answer what it has seen, and soon."""
        self._body = None
        self.deadline = self._server.now + LINGER_S

    def _pass(self, data: bytes) -> None:
        if data:
            try:
                self._fallback.data_received(data)
            except RAISED as error:
                self._cut(error)

    def _cut(self, error: BaseException) -> None:
        report("passing a request on to the fallback", error)
        self.drop()
