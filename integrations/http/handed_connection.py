"""A connection whose request the fallback reads and answers, within the limits of this server.

Invariants:
- the fallback gets one request, to its last byte, and nothing after it;
- while the request is being read, the server's limits on rate and size apply, and its bytes count
  as a body in memory until the connection is closed;
- the time to make the answer is not limited, the client's time to read it is.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from rollout_sched.integrations.http.backlog import Backlog
from rollout_sched.integrations.http.bodies import Body, Chunked, Length
from rollout_sched.integrations.http.errors import RAISED, Malformed, report
from rollout_sched.integrations.http.heads import CHUNKED
from rollout_sched.integrations.http.lingering import LINGER_S

if TYPE_CHECKING:
    from rollout_sched.integrations.http.server import HttpServer


class HandedConnection(asyncio.Protocol):
    """Passes the events of a connection on to `fallback`. `length`: of the request's body.

    `deadline` is the loop time until which the server waits for the client.
    """

    def __init__(
        self,
        server: HttpServer,
        fallback: asyncio.Protocol,
        transport: asyncio.Transport,
        backlog: Backlog,
        length: int,
    ) -> None:
        self._server = server
        self._fallback = fallback
        self._transport = transport
        self._body: Body | None  # None once no more of the request is passed on
        if length == CHUNKED:
            self._body = Chunked(server.limits.max_body, fair=True)
        else:
            self._body = Length(length)  # the fallback decides whether it is too long
        self._held = 0
        self._backlog = backlog
        self.deadline = server.connections.now + server.limits.stall_s

    def begin(self, head: bytes, rest: bytes) -> None:
        """Pass on the data that has arrived: a head, and the bytes after it."""
        try:
            self._fallback.connection_made(self._transport)
            if self._backlog.throttled:
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
        except Malformed:  # the fallback answers it
            self._pass(data)
            self._stop()
            return
        server, bodies = self._server, self._server.bodies
        if bodies.used + len(payload) > bodies.most:
            bodies.full()
            self.drop()
            return
        self._held += len(payload)
        bodies.used += len(payload)
        self._pass(data[: len(data) - len(rest or b"")])
        if self._held > server.limits.max_body:
            self._stop()
        elif rest is not None:
            self._body = None
            self._wait()
        elif not self._backlog.throttled:
            self.deadline = server.connections.put_off(self.deadline, len(payload))

    def eof_received(self) -> bool | None:
        return self._fallback.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.handed.pop(self, None)
        self._server.bodies.used -= self._held
        self._held = 0
        self._fallback.connection_lost(exc)

    def pause_writing(self) -> None:
        self._backlog.begin()
        self._wait()
        self._fallback.pause_writing()

    def resume_writing(self) -> None:
        self._backlog.end()
        self._wait()
        self._fallback.resume_writing()

    def expire(self) -> None:
        """The deadline has passed."""
        unasked = self._body is not None and not self._transport.is_reading()
        not_its_fault = unasked and not self._backlog.throttled
        if self._backlog.shrinks() or not_its_fault:
            self._wait()
        else:
            self.drop()

    def drop(self) -> None:
        self._transport.abort()

    def _wait(self) -> None:
        """Set the deadline of the current state."""
        waiting = self._backlog.throttled or self._body is not None
        deadline = self._server.connections.now + self._server.limits.stall_s
        self.deadline = deadline if waiting else math.inf

    def _stop(self) -> None:
        """The body is too long or malformed: the fallback gets a short time to answer."""
        self._body = None
        self.deadline = self._server.connections.now + LINGER_S

    def _pass(self, data: bytes) -> None:
        if data:
            try:
                self._fallback.data_received(data)
            except RAISED as error:
                self._cut(error)

    def _cut(self, error: BaseException) -> None:
        report("passing a request on to the fallback", error)
        self.drop()
