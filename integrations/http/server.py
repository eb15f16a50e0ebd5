"""An HTTP/1.1 server for the few requests that are hot, and a door to another one for the rest.

Invariants:
- requests of one connection are handled one at a time, in order; what is pipelined waits, bounded;
- a request is handed to the app, or the connection to the fallback, only with its whole head, so
  that slow or endless heads end here;
- every state in which we wait for the client has a deadline; only the app may take its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import ssl as tls
from collections.abc import Callable
from typing import Protocol, cast

from rollout_sched.integrations.http.bodies import Body, body_of
from rollout_sched.integrations.http.errors import Malformed
from rollout_sched.integrations.http.heads import (
    END,
    Head,
    read_request,
    status_line,
)
from rollout_sched.integrations.http.request import Request

#: What is read ahead of the running request, in bytes, before reading stops.
READ_AHEAD = 64 * 1024

#: Seconds for which a refused client may go on sending before its connection is cut. Closed at
#: once, the kernel would answer what it sends with a reset, which can overtake our refusal.
LINGER_S = 2.0

_AUTHORITY = re.compile(rb"(?i)https?://[^/?]*")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class App(Protocol):
    def wants(self, method: bytes, target: bytes) -> bool:
        """Whether a request is for `handle`; the others go to the fallback."""

    def handle(self, request: Request) -> None:
        """Answer a request, now or later."""


class HttpServer:
    """A protocol factory for `loop.create_server`, and the limits its connections keep.

    app              answers what it wants
    fallback         makes the protocol that the other connections are handed to, such as
                     `aiohttp.web.AppRunner(...).server`; what it answers should close the
                     connection, for there is no way back. None: they are answered 404
    max_body         bytes of request body; more is answered 413
    max_head         bytes of request head; more is answered 431
    max_unsent       bytes of an answer that wait for a slow client; with more it is cut off
    max_connections  more are answered 503
    head_s           seconds from the first byte of a head to its last
    idle_s           seconds a connection may be idle between requests
    stall_s          seconds without progress while a body is read or an answer waits to be taken

    `refused` counts connections beyond the limit.
    """

    def __init__(
        self,
        app: App,
        fallback: Callable[[], asyncio.Protocol] | None = None,
        *,
        max_body: int = 64 * 1024 * 1024,
        max_head: int = 32 * 1024,
        max_unsent: int = 64 * 1024 * 1024,
        max_connections: int = 16384,
        head_s: float = 10.0,
        idle_s: float = 75.0,
        stall_s: float = 60.0,
    ) -> None:
        self.app = app
        self.fallback = fallback
        self.max_body = max_body
        self.max_head = max_head
        self.max_unsent = max_unsent
        self.max_connections = max_connections
        self.head_s = head_s
        self.idle_s = idle_s
        self.stall_s = stall_s
        self.refused = 0
        self.closing = False
        self.now = 0.0  # loop time of the last sweep: exact enough for deadlines, and free
        self.connections: set[Connection] = set()
        self._handed: set[asyncio.BaseTransport] = set()
        self._listeners: list[asyncio.AbstractServer] = []
        self._sweep_s = min(1.0, min(head_s, idle_s, stall_s) / 4)
        self._sweeper: asyncio.TimerHandle | None = None
        self._empty: asyncio.Event | None = None

    def __call__(self) -> asyncio.Protocol:
        if self._sweeper is None:
            self._sweep()
        return cast(asyncio.Protocol, Connection(self))

    async def listen(
        self, host: str, port: int, *, ssl: tls.SSLContext | None = None, backlog: int = 4096
    ) -> asyncio.Server:
        """Accept connections until `close`; port 0 picks a free one."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(self, host, port, ssl=ssl, backlog=backlog)
        self._listeners.append(listener)
        return listener

    async def close(self, grace_s: float = 10.0) -> None:
        """Accept no more, let what runs finish for up to `grace_s` seconds, then close.

        Connections that were handed to the fallback are the fallback's to close.
        """
        self.closing = True
        for listener in self._listeners:
            listener.close()
        for connection in list(self.connections):
            connection.retire()
        self._empty = asyncio.Event()
        try:
            if self.connections:
                async with asyncio.timeout(grace_s):
                    await self._empty.wait()
        except TimeoutError:
            for connection in list(self.connections):
                connection.drop()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    def joined(self, connection: Connection) -> bool:
        """Count a connection in, unless that would be too many."""
        if len(self.connections) + len(self._handed) >= self.max_connections:
            self.refused += 1
            return False
        self.connections.add(connection)
        return True

    def left(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections and self._empty is not None:
            self._empty.set()

    def handed(self, transport: asyncio.BaseTransport) -> None:
        """A connection now belongs to the fallback; it counts for the limit as long as it lives."""
        self._handed.add(transport)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        self._handed = {transport for transport in self._handed if not transport.is_closing()}
        for connection in [c for c in self.connections if c.deadline < self.now]:
            connection.expire()
        self._sweeper = loop.call_later(self._sweep_s, self._sweep)


class Connection:
    """One client: cuts its requests out of what it sends, and sends it their answers.

    An `asyncio.Protocol` in all but name: what inherits from a class of the interpreter is not
    compiled (setup.py).

    `deadline` is the loop time until which we wait for the client.
    """

    __slots__ = (
        "_body",
        "_data",
        "_handling",
        "_head",
        "_lingering",
        "_payload",
        "_pos",
        "_reading",
        "_request",
        "_server",
        "_stopped",
        "_throttled",
        "_transport",
        "_unsent",
        "deadline",
        "keep_alive",
    )

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._data = b""  # received and, from _pos on, not yet looked at
        self._pos = 0
        self._reading = False  # a request has begun to arrive and is not complete
        self._head: tuple[bytes, bytes, Head] | None = None  # of that request, once it is there
        self._body: Body | None = None
        self._payload = bytearray()
        self._request: Request | None = None  # the one that is being answered
        self._handling = False  # the app is in `handle`
        self._stopped = False  # we do not read for now
        self._throttled = False  # the client does not read for now
        self._unsent = 0  # bytes it had to read when we last looked
        self._lingering = False  # what still comes is thrown away
        self.keep_alive = True
        self.deadline = math.inf

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.deadline = self._server.now + self._server.idle_s
        if not self._server.joined(self):
            self._lingering = True
            self._transport.write(_refusal(503))
            self._transport.close()

    def eof_received(self) -> None:
        # A client that closes and one that only stops sending look the same; either way no answer
        # that is still to be made would be read by any client known.
        if self._request is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.left(self)
        request, self._request = self._request, None
        if request is not None:
            request.lose()

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        if self._body is None:
            if self._pos < len(self._data):
                data = self._data[self._pos :] + data
            self._data = data
            self._pos = 0
        try:
            if self._body is not None:
                self._read_body(self._body, data)
            self._read()
        except Malformed as error:
            self._refuse(error.status)

    def pause_writing(self) -> None:
        self._throttled = True
        self._unsent = self._transport.get_write_buffer_size()
        self.deadline = self._server.now + self._server.stall_s
        if self._request is not None and self._request.on_pause is not None:
            self._request.on_pause()

    def resume_writing(self) -> None:
        self._throttled = False
        self._wait()
        if self._request is not None and self._request.on_resume is not None:
            self._request.on_resume()

    # What a request asks of the connection it came on (request.Outlet).

    def send(self, data: bytes, more: bytes = b"") -> None:
        if more:
            self._transport.writelines((data, more))
        else:
            self._transport.write(data)
        if self._throttled and self._transport.get_write_buffer_size() > self._server.max_unsent:
            self._transport.abort()

    def complete(self) -> None:
        self._request = None
        if not self.keep_alive:
            self._linger()
            return
        self._wait()
        if not self._handling and self._data:
            try:
                self._read()
            except Malformed as error:
                self._refuse(error.status)

    # What the server asks of its connections.

    def retire(self) -> None:
        """Take no further request: close now, or after the answer that is under way."""
        self.keep_alive = False
        if self._request is None and not self._reading and not self._lingering:
            self._transport.close()

    def expire(self) -> None:
        """The deadline has passed."""
        unsent = self._transport.get_write_buffer_size()
        if self._throttled and unsent < self._unsent:  # slow, but not stuck
            self._unsent = unsent
            self.deadline = self._server.now + self._server.stall_s
        elif self._reading and not self._throttled:
            self._refuse(408)
        else:
            self.drop()

    def drop(self) -> None:
        self._transport.abort()

    def _wait(self) -> None:
        """Set the deadline of the state we are in."""
        server = self._server
        if self._throttled:
            self.deadline = server.now + server.stall_s
        elif self._request is not None:
            self.deadline = math.inf
        elif self._body is not None:
            self.deadline = server.now + server.stall_s
        else:
            self.deadline = server.now + (server.head_s if self._reading else server.idle_s)

    def _read(self) -> None:
        """Handle what has arrived, up to the first request that is not answered at once."""
        while self._pos < len(self._data) and self._request is None and self._read_request():
            pass
        ahead = len(self._data) - self._pos
        if not ahead:
            self._data = b""
            self._pos = 0
        if (ahead > READ_AHEAD) is not self._stopped and not self._transport.is_closing():
            self._stopped = not self._stopped
            if self._stopped:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _read_request(self) -> bool:
        """Handle the request that begins at `_pos`. False if it is not all there."""
        data = self._data
        while data.startswith(b"\r\n", self._pos):  # allowed between requests (RFC 9112, 2.2)
            self._pos += 2
        server = self._server
        start = self._pos
        end = data.find(END, start)
        if (len(data) if end < 0 else end) - start > server.max_head:
            raise Malformed(f"the head is longer than {server.max_head} bytes", status=431)
        if end < 0:
            if not self._reading:
                self._reading = True
                self._wait()
            return False
        method, target, head = read_request(data[start:end])
        end += len(END)
        if target[0] != _SLASH:
            at, asked = start + len(method) + 1, target
            target = _AUTHORITY.sub(b"", asked, count=1) or b"/"
            if target[0] != _SLASH:
                raise Malformed("the target is neither a path nor an http URL")
            # Whoever it is handed to reads the path alone, so that both read the same.
            self._data = data = data[:at] + target + data[at + len(asked) :]
            end += len(target) - len(asked)
        if not server.app.wants(method, target):
            self._hand_over()
            return False
        if head.minor and b"host" not in head.fields:
            raise Malformed("no Host")
        length = head.length(0)
        if length > server.max_body:
            raise Malformed(f"the body is longer than {server.max_body} bytes", status=413)
        self.keep_alive = head.keep_alive and not server.closing
        if 0 <= length <= len(data) - end:
            self._pos = end + length
            self._handle(method, target, head, data[end : end + length])
            return True
        self._head = method, target, head
        self._body = body = body_of(length)
        self._reading = True
        self._wait()
        self._data = b""
        self._pos = 0
        if b"expect" in head.fields and end == len(data):
            self._expect(head)
        return self._read_body(body, data[end:])

    def _expect(self, head: Head) -> None:
        if head.fields[b"expect"].lower() != b"100-continue":
            raise Malformed("an unknown expectation", status=417)
        if head.minor:
            self._transport.write(_CONTINUE)

    def _read_body(self, body: Body, data: bytes) -> bool:
        """Handle the request if its body is complete. False if it is not all there."""
        payload, rest = body.feed(data)
        self._payload += payload
        if len(self._payload) > self._server.max_body:
            raise Malformed(f"the body is longer than {self._server.max_body} bytes", status=413)
        if rest is None:
            self._wait()
            return False
        assert self._head is not None
        method, target, head = self._head
        whole = bytes(self._payload)
        self._payload = bytearray()
        self._head = self._body = None
        self._data = rest
        self._handle(method, target, head, whole)
        return True

    def _handle(self, method: bytes, target: bytes, head: Head, body: bytes) -> None:
        self._request = request = Request(self, method, target, head, body)
        self._reading = False
        if not self._throttled:
            self.deadline = math.inf
        self._handling = True
        try:
            self._server.app.handle(request)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"handling {method!r} {target!r} failed", "exception": error}
            )
            self._fail(request)
        finally:
            self._handling = False

    def _fail(self, request: Request) -> None:
        """The app has given up on a request: say so if nothing has been said yet."""
        if self._request is request:
            if request.begun:
                self._transport.abort()
            else:
                request.answer(500, (), b"")

    def _hand_over(self) -> None:
        """Give the connection to the fallback, with all that has not been looked at."""
        fallback = self._server.fallback
        if fallback is None:
            raise Malformed("there is no such place", status=404)
        data = self._data[self._pos :]
        self._data = b""
        self._pos = 0
        self._server.handed(self._transport)
        self._server.left(self)
        protocol = fallback()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if self._throttled:
            protocol.pause_writing()
        protocol.data_received(data)

    def _refuse(self, status: int) -> None:
        """Answer a request that cannot be read, after which nothing that comes makes sense."""
        self._head = self._body = None
        self._payload = bytearray()
        self._transport.write(_refusal(status))
        self._linger()

    def _linger(self) -> None:
        """Close after what has been written, once the client has had a chance to read it."""
        self._lingering = True
        self._reading = False
        self._data = b""
        self._pos = 0
        self.deadline = self._server.now + LINGER_S
        if self._transport.is_closing():
            return
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client was faster
                self._transport.write_eof()
        else:
            self._transport.close()


_SLASH = ord("/")


def _refusal(status: int) -> bytes:
    return status_line(status) + b"connection: close\r\ncontent-length: 0\r\n\r\n"
