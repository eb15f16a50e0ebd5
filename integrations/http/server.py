"""An HTTP/1.1 server for the few requests that are hot, and a door to another one for the rest.

Invariants:
- requests of one connection are handled one at a time, in order; what is pipelined waits, bounded;
- a request is handed to the app, or the connection to the fallback, only with its whole head, so
  that slow or endless heads end here;
- no byte of a body is kept of a request that the app does not admit, and what is kept of all
  bodies, being read or being worked on, is within one bound;
- every state in which we wait for the client has a deadline; only the app may take its time;
- what the app or the fallback raises ends the request it was about, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import ssl as tls
from collections.abc import Callable, Mapping
from typing import Protocol, cast

from rollout_sched.integrations.http.bodies import Body, body_of, too_long
from rollout_sched.integrations.http.errors import RAISED, Malformed, report
from rollout_sched.integrations.http.handed import LINGER_S, Handed
from rollout_sched.integrations.http.heads import (
    END,
    Head,
    Headers,
    read_request,
    status_line,
    write_fields,
)
from rollout_sched.integrations.http.liveness import watch_peer
from rollout_sched.integrations.http.request import Request

#: What is read ahead of the running request, in bytes, before reading stops.
READ_AHEAD = 64 * 1024

#: Requests of one connection that are handled in one go; the next ones let others go first.
AT_ONCE = 16

_AUTHORITY = re.compile(rb"(?i)https?://[^/?]*")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

#: Status, headers and body of an answer that turns a request away.
Refusal = tuple[int, Headers, bytes]


class App(Protocol):
    def wants(self, method: bytes, target: bytes) -> bool:
        """Whether a request is for `handle`; the others go to the fallback."""

    def refusal(
        self, method: bytes, target: bytes, fields: Mapping[bytes, bytes]
    ) -> Refusal | None:
        """What a request that `wants` would take is turned away with, before its body is read."""

    def handle(self, request: Request) -> None:
        """Answer a request, now or later."""


class HttpServer:
    """A protocol factory for `loop.create_server`, and the limits its connections keep.

    app              answers what it wants
    fallback         makes the protocol that the other connections are handed to, such as
                     `aiohttp.web.AppRunner(...).server`, each for one request; what it answers
                     should close the connection, for there is no way back. None: they are answered
                     404
    max_body         bytes of request body; more is answered 413
    max_bodies       bytes of all bodies that are being read or worked on; more is answered 503
    max_head         bytes of request head; more is answered 431
    max_unsent       bytes of an answer that wait for a slow client; with more it is cut off
    max_connections  more are answered 503
    head_s           seconds from the first byte of a head to its last
    idle_s           seconds a connection may be idle between requests
    stall_s          seconds without progress while a body is read or an answer waits to be taken
    body_rate        bytes a second that a body must come with once `stall_s` has passed, else 408
    dead_s           seconds after which a client that no longer answers even on TCP is taken for
                     gone (`Pool`); not below `stall_s`, for the system does not tell it from one
                     that does not read

    `refused` counts what was turned away for want of room: connections, and bodies; `bodies` is
    what of `max_bodies` is in use. What the fallback is handed keeps the same limits, but is cut
    off where it breaks them: only the fallback knows what it has answered.
    """

    def __init__(
        self,
        app: App,
        fallback: Callable[[], asyncio.Protocol] | None = None,
        *,
        max_body: int = 64 * 1024 * 1024,
        max_bodies: int = 4 * 1024 * 1024 * 1024,
        max_head: int = 32 * 1024,
        max_unsent: int = 64 * 1024 * 1024,
        max_connections: int = 16384,
        head_s: float = 10.0,
        idle_s: float = 75.0,
        stall_s: float = 60.0,
        body_rate: float = 16 * 1024,
        dead_s: float = 60.0,
    ) -> None:
        self.app = app
        self.fallback = fallback
        self.max_body = min(max_body, max_bodies)
        self.max_bodies = max_bodies
        self.max_head = max_head
        self.max_unsent = max_unsent
        self.max_connections = max_connections
        self.head_s = head_s
        self.idle_s = idle_s
        self.stall_s = stall_s
        self.dead_s = dead_s
        self.refused = 0
        self.bodies = 0
        self.closing = False
        self.now = 0.0  # loop time of the last sweep: exact enough for deadlines, and free
        self.connections: set[Connection] = set()
        self.handed: set[Handed] = set()
        self._per_byte_s = 1 / body_rate
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
        if len(self.connections) + len(self.handed) >= self.max_connections:
            self.refused += 1
            return False
        self.connections.add(connection)
        return True

    def left(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections and self._empty is not None:
            self._empty.set()

    def full(self) -> Malformed:
        """Why a body is turned away that `max_bodies` leaves no room for."""
        self.refused += 1
        return Malformed(f"{self.bodies} bytes of bodies are here already", status=503)

    def put_off(self, deadline: float, size: int) -> float:
        """The deadline of a body of which so many bytes have come."""
        return min(self.now + self.stall_s, deadline + size * self._per_byte_s)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        self._sweeper = loop.call_later(self._sweep_s, self._sweep)
        late: list[Connection | Handed] = [c for c in self.connections if c.deadline < self.now]
        late += [h for h in self.handed if h.deadline < self.now]
        for connection in late:
            try:
                connection.expire()
            except Exception as error:  # the others have waited as long
                report("ending a connection that has waited too long", error)


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
        "_held",
        "_lingering",
        "_payload",
        "_pos",
        "_reading",
        "_request",
        "_searched",
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
        self._searched = 0  # bytes from there on in which no head ends
        self._held = 0  # bytes of the body that is being read or worked on
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
        watch_peer(transport.get_extra_info("socket"), self._server.dead_s)
        self.deadline = self._server.now + self._server.idle_s
        if not self._server.joined(self):
            self._lingering = True
            self._transport.write(_refusal(503, [_RETRY], b""))
            self._transport.close()

    def eof_received(self) -> None:
        # A client that closes and one that only stops sending look the same; either way no answer
        # that is still to be made would be read by any client known.
        if self._request is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.left(self)
        self._let_go()
        request, self._request = self._request, None
        if request is not None:
            try:
                request.lose()
            except RAISED as error:
                report("telling that a client has gone", error)

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
        except RAISED as error:
            self._give_up(error)

    def pause_writing(self) -> None:
        self._throttled = True
        self._unsent = self._transport.get_write_buffer_size()
        self.deadline = self._server.now + self._server.stall_s
        if self._request is not None and self._request.on_pause is not None:
            self._tell(self._request, self._request.on_pause)

    def resume_writing(self) -> None:
        self._throttled = False
        self._wait()
        if self._request is not None and self._request.on_resume is not None:
            self._tell(self._request, self._request.on_resume)

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
        if self._held:
            self._server.bodies -= self._held
            self._held = 0
        if not self.keep_alive:
            self._linger()
            return
        self._wait()
        if not self._handling and self._data:
            self._go_on()

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
        done = 0
        while self._pos < len(self._data) and self._request is None and self._read_request():
            done += 1
            if done == AT_ONCE:
                asyncio.get_running_loop().call_soon(self._go_on)
                break
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

    def _go_on(self) -> None:
        """Read on where nobody else would catch what that raises."""
        try:
            self._read()
        except Malformed as error:
            self._refuse(error.status)
        except RAISED as error:
            self._give_up(error)

    def _read_request(self) -> bool:
        """Handle the request that begins at `_pos`. False if it is not all there."""
        data = self._data
        server = self._server
        start = self._pos
        if data.startswith(b"\r\n", start):  # one is allowed between requests (RFC 9112, 2.2)
            start += 2
        head_end = data.find(END, start + self._searched)
        if head_end < 0:
            self._await_head(start)
            return False
        end = head_end + len(END)
        if end - self._pos > server.max_head:
            raise _long_head(server.max_head)
        self._searched = 0
        method, target, head = read_request(data[start:head_end])
        if target[0] != _SLASH:
            at, asked = start + len(method) + 1, target
            target = _AUTHORITY.sub(b"", asked, count=1) or b"/"
            if target[0] != _SLASH:
                raise Malformed("the target is neither a path nor an http URL")
            # Whoever it is handed to reads the path alone, so that both read the same.
            self._data = data = data[:at] + target + data[at + len(asked) :]
            end += len(target) - len(asked)
        length = head.length(0)
        if not server.app.wants(method, target):
            self._hand_over(length, end)
            return False
        if head.minor and b"host" not in head.fields:
            raise Malformed("no Host")
        refusal = server.app.refusal(method, target, head.fields)
        if refusal is not None:
            self._turn_away(*refusal)
            return False
        if length > server.max_body:
            raise too_long(server.max_body)
        if server.bodies + length > server.max_bodies:
            raise server.full()
        if b"expect" in head.fields:
            self._expect(head, length)
        self.keep_alive = head.keep_alive and not server.closing
        if 0 <= length <= len(data) - end:
            self._held = length
            server.bodies += length
            self._pos = end + length
            self._handle(method, target, head, data[end : end + length])
            return True
        self._head = method, target, head
        self._body = body = body_of(length, server.max_body, fair=True)
        self._reading = True
        self._wait()
        self._data = b""
        self._pos = 0
        return self._read_body(body, data[end:])

    def _await_head(self, start: int) -> None:
        """There is no end yet of the head that begins at `start`."""
        size = len(self._data)
        if size - self._pos >= self._server.max_head:
            raise _long_head(self._server.max_head)
        self._searched = max(0, size - start - len(END))
        if not self._reading:
            self._reading = True
            self._wait()

    def _expect(self, head: Head, length: int) -> None:
        """Ask for the body, whether or not it has begun to come: packets are to change nothing."""
        if head.fields[b"expect"].lower() != b"100-continue":
            raise Malformed("an unknown expectation", status=417)
        if head.minor and length:
            self._transport.write(_CONTINUE)

    def _read_body(self, body: Body, data: bytes) -> bool:
        """Handle the request if its body is complete. False if it is not all there."""
        payload, rest = body.feed(data)
        server = self._server
        size = len(payload)
        if server.bodies + size > server.max_bodies:
            raise server.full()
        self._held += size
        server.bodies += size
        self._payload += payload
        if rest is None:
            if not self._throttled:
                self.deadline = server.put_off(self.deadline, size)
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
        except RAISED as error:
            report(f"handling {method!r} {target!r}", error)
            self._fail(request)
        finally:
            self._handling = False

    def _tell(self, request: Request, what: Callable[[], None]) -> None:
        """Call what the app has left to be called."""
        try:
            what()
        except RAISED as error:
            report(f"slowing down {request.method!r} {request.target!r}", error)
            # Aborted in `resume_writing`, asyncio's transport would say twice that it is lost.
            asyncio.get_running_loop().call_soon(self._fail, request)

    def _fail(self, request: Request) -> None:
        """The app has given up on a request: say so if nothing has been said yet."""
        if self._request is request:
            if request.begun:
                self._transport.abort()
            else:
                request.answer(500, (), b"")

    def _hand_over(self, length: int, end: int) -> None:
        """Give the connection to the fallback, with the request whose head ends at `end`."""
        server = self._server
        if server.fallback is None:
            raise Malformed("there is no such place", status=404)
        if length <= server.max_body and server.bodies + length > server.max_bodies:
            raise server.full()
        handed = Handed(server, server.fallback(), self._transport, length)
        head, rest = self._data[self._pos : end], self._data[end:]
        self._data = b""
        self._pos = 0
        server.left(self)
        server.handed.add(handed)
        self._transport.set_protocol(cast(asyncio.Protocol, handed))
        handed.begin(head, rest, self._throttled)

    def _let_go(self) -> None:
        """No body is here any more."""
        self._server.bodies -= self._held
        self._held = 0

    def _give_up(self, error: BaseException) -> None:
        """What should not raise has raised while we read."""
        report("reading a request", error)
        if self._request is not None:
            self._fail(self._request)
        else:
            self._refuse(500)

    def _refuse(self, status: int) -> None:
        """Answer a request that cannot be read, after which nothing that comes makes sense."""
        self._turn_away(status, [_RETRY] if status == 503 else [], b"")

    def _turn_away(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer a request without reading it."""
        self._head = self._body = None
        self._payload = bytearray()
        self._let_go()
        self._transport.write(_refusal(status, headers, body))
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


def _long_head(most: int) -> Malformed:
    return Malformed(f"the head is longer than {most} bytes", status=431)


_RETRY = (b"retry-after", b"1")


def _refusal(status: int, headers: Headers, body: bytes) -> bytes:
    last = b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    return status_line(status) + write_fields(headers) + last + body
