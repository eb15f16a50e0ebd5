"""One client's connection to a server (see `server` for the invariants)."""

from __future__ import annotations

import asyncio
import math
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final, cast

from rollout_sched.integrations.http.bodies import Body, Chunked, Length, body_of, too_long
from rollout_sched.integrations.http.connections import LINGER_S, Backlog, Lingering
from rollout_sched.integrations.http.errors import RAISED, Malformed, report, watch_peer
from rollout_sched.integrations.http.heads import (
    CHUNKED,
    Head,
    HeadBuffer,
    Headers,
    read_request,
    status_line,
    write_fields,
)
from rollout_sched.integrations.http.request import ReceivedRequest

if TYPE_CHECKING:
    from rollout_sched.integrations.http.server import HttpServer


# ------------------------------------------------------------------------------------------
# A connection whose request the fallback reads and answers, within the limits of this server.
#
# Invariants:
# - the fallback gets one request, to its last byte, and nothing after it;
# - while the request is being read, the server's limits on rate and size apply, and its bytes count
#   as a body in memory until the connection is closed;
# - the time to make the answer is not limited, the client's time to read it is.


class HandedConnection:
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
        body = self._body
        if body is None or self._transport.is_closing():
            return
        try:
            payload, rest = body.feed(data)
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
            self.deadline = server.connections.extend_deadline(self.deadline, len(payload))

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


#: Bytes that are read ahead of the running request before reading stops.
READ_AHEAD: Final = 64 * 1024

#: Requests of one connection that are handled without a break; then other connections run first.
AT_ONCE: Final = 16


def address_of(transport: asyncio.BaseTransport) -> str:
    """The address of a client, "unknown" where it has none. Whoever has an IPv6 address has all of
    its network of 64 bits: they are one client."""
    name = transport.get_extra_info("peername")
    if not isinstance(name, tuple):
        return "unknown"
    text = str(name[0])
    if ":" not in text:
        return text
    address = ip_address(text)
    assert isinstance(address, IPv6Address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{IPv6Address(int(address) >> 64 << 64)}/64"


_SLASH: Final = ord("/")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Upload:
    """An admitted request whose body is still arriving."""

    __slots__ = ("framing", "head", "method", "payload", "target")

    def __init__(self, method: bytes, target: bytes, head: Head, framing: Body) -> None:
        self.method = method
        self.target = target
        self.head = head
        self.framing = framing
        self.payload = bytearray()


class ServerConnection:
    """Reads requests from a client, and sends their answers.

    It has the methods of an `asyncio.Protocol` but does not inherit from it: a class that inherits
    from a class of the interpreter is not compiled (setup.py).

    `deadline` is the loop time until which the server waits for the client.
    """

    __slots__ = (
        "_backlog",
        "_buffer",
        "_handling",
        "_held",
        "_reading",
        "_request",
        "_server",
        "_stopped",
        "_transport",
        "_upload",
        "deadline",
        "keep_alive",
        "peer",
    )

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._backlog: Backlog
        self._buffer = HeadBuffer(server.limits.max_head)
        self._upload: Upload | None = None
        self._held = 0  # bytes of the body that is being read or processed
        self._reading = False  # a request has begun to arrive and is not complete
        self._request: ReceivedRequest | None = None  # the request that is being answered
        self._handling = False  # the app is in `handle`
        self._stopped = False  # reading is paused
        self.keep_alive = True
        self.peer = ""
        self.deadline = math.inf

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self._server
        self._transport = cast(asyncio.Transport, transport)
        self._backlog = Backlog(self._transport, server.limits.max_unsent)
        watch_peer(transport.get_extra_info("socket"), server.limits.dead_s)
        self.peer = address_of(transport)
        self.deadline = server.connections.now + server.limits.idle_s
        if not server.connections.join(self, self.peer):
            self._transport.write(_refusal(503, [_RETRY], b""))
            self._transport.set_protocol(asyncio.Protocol())  # it drops further data
            self._transport.close()

    def eof_received(self) -> None:
        # A client that closes and one that only stops sending look the same. In both cases no known
        # client would read an answer that comes later.
        if self._request is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.leave(self)
        self._release_body()
        request, self._request = self._request, None
        if request is not None:
            try:
                request.lose()
            except RAISED as error:
                report("reporting that a client has disconnected", error)

    def data_received(self, data: bytes) -> None:
        """Handle the received data, up to the first request that is not answered at once."""
        buffer = self._buffer
        try:
            if self._upload is not None:
                self._read_body(self._upload, data)
            elif data:
                buffer.feed(data)
            done = 0
            while buffer.pos < len(buffer.data) and self._request is None and self._read_request():
                done += 1
                if done == AT_ONCE:
                    asyncio.get_running_loop().call_soon(self.data_received, b"")
                    break
            ahead = len(buffer.data) - buffer.pos
            if (ahead > READ_AHEAD) is not self._stopped:
                self._stop_or_go()
        except Malformed as error:
            self._turn_away(error.status, [_RETRY] if error.status == 503 else [], b"")
        except RAISED as error:  # unexpected
            report("reading a request", error)
            if self._request is not None:
                self._request.fail()
            else:
                self._turn_away(500, [], b"")

    def pause_writing(self) -> None:
        self._backlog.begin()
        self._wait()
        if self._request is not None:
            self._request.pause()

    def resume_writing(self) -> None:
        self._backlog.end()
        self._wait()
        if self._request is not None:
            self._request.resume()

    # Called by the request (request.Outlet).

    def send(self, data: bytes) -> None:
        self._transport.write(data)
        if self._backlog.throttled:
            self._backlog.cut()

    def send_both(self, head: bytes, body: bytes) -> None:
        self._transport.writelines((head, body))
        if self._backlog.throttled:
            self._backlog.cut()

    def complete(self) -> None:
        server = self._server
        self._request = None
        if self._held:
            server.bodies.used -= self._held
            self._held = 0
        if not self.keep_alive:
            self._linger()
        elif self._backlog.throttled:
            self._wait()
        else:
            self.deadline = server.connections.now + server.limits.idle_s
        if not self._handling and self._buffer.data:
            self.data_received(b"")  # handle the data that has arrived meanwhile

    # Called by the server (connections.ServedConnection).

    @property
    def idle(self) -> bool:
        return self._request is None and not self._reading

    def retire(self) -> None:
        self.keep_alive = False
        if self.idle:
            self._transport.close()

    def expire(self) -> None:
        if self._backlog.shrinks():
            self._wait()
        elif self._reading and not self._backlog.throttled:
            self._turn_away(408, [], b"")
        else:
            self.drop()

    def drop(self) -> None:
        self._transport.abort()

    def _wait(self) -> None:
        """Set the deadline of the current state."""
        now = self._server.connections.now
        limits = self._server.limits
        if self._backlog.throttled:
            self.deadline = now + limits.stall_s
        elif self._request is not None:
            self.deadline = math.inf
        elif self._upload is not None:
            self.deadline = now + limits.stall_s
        else:
            self.deadline = now + (limits.head_s if self._reading else limits.idle_s)

    def _stop_or_go(self) -> None:
        if not self._transport.is_closing():
            self._stopped = not self._stopped
            if self._stopped:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _read_request(self) -> bool:
        """Handle the next request in the buffer. False if it is not complete."""
        server = self._server
        buffer = self._buffer
        found = buffer.head()
        if found is None:
            if not self._reading:
                self._reading = True
                self._wait()
            return False
        method, target, head = read_request(found)
        if target[0] != _SLASH:
            target = buffer.cut_authority(method, target)
        length = head.length(0)
        if not server.app.wants(method, target):
            self._hand_over(length)
            return False
        if head.minor and b"host" not in head.fields:
            raise Malformed("no Host")
        refusal = server.app.refusal(method, target, head.fields)
        if refusal is not None:
            self._turn_away(*refusal)
            return False
        bodies = server.bodies
        if length > server.limits.max_body:
            raise too_long(server.limits.max_body)
        if bodies.used + length > bodies.most:
            raise bodies.full()
        # Sent even if the body has begun to arrive: the result must not depend on packet timing.
        if b"expect" in head.fields and _expects(head, length):
            self._transport.write(_CONTINUE)
        self.keep_alive = head.keep_alive and not server.closing
        if 0 <= length <= len(buffer.data) - buffer.pos:
            self._held = length
            bodies.used += length
            self._handle(method, target, head, buffer.body(length))
            return True
        framing = body_of(length, server.limits.max_body, fair=True)
        self._upload = upload = Upload(method, target, head, framing)
        self._reading = True
        self.deadline = server.connections.now + server.limits.stall_s
        return self._read_body(upload, buffer.rest())

    def _read_body(self, upload: Upload, data: bytes) -> bool:
        """Handle the request if its body is complete. False if it is not."""
        payload, rest = upload.framing.feed(data)
        bodies = self._server.bodies
        size = len(payload)
        if bodies.used + size > bodies.most:
            raise bodies.full()
        self._held += size
        bodies.used += size
        upload.payload += payload
        if rest is None:
            if not self._backlog.throttled:
                self.deadline = self._server.connections.extend_deadline(self.deadline, size)
            return False
        self._upload = None
        if rest:
            self._buffer.feed(rest)
        self._handle(upload.method, upload.target, upload.head, bytes(upload.payload))
        return True

    def _handle(self, method: bytes, target: bytes, head: Head, body: bytes) -> None:
        self._request = request = ReceivedRequest(self, method, target, head, body)
        self._reading = False
        if not self._backlog.throttled:
            self.deadline = math.inf
        self._handling = True
        try:
            self._server.app.handle(request)
        except RAISED as error:
            report(f"handling {method!r} {target!r}", error)
            request.fail()
        finally:
            self._handling = False

    def _hand_over(self, length: int) -> None:
        """Pass the connection to the fallback, with the request whose head was read last."""
        server = self._server
        if server.fallback is None:
            raise Malformed("no such path", status=404)
        if length <= server.limits.max_body and server.bodies.used + length > server.bodies.most:
            raise server.bodies.full()
        handed = HandedConnection(server, server.fallback(), self._transport, self._backlog, length)
        head, rest = self._buffer.last_head(), self._buffer.rest()
        server.connections.transfer(self, handed)
        self._transport.set_protocol(cast(asyncio.Protocol, handed))
        handed.begin(head, rest)

    def _release_body(self) -> None:
        """The body is no longer in memory."""
        self._upload = None
        self._server.bodies.used -= self._held
        self._held = 0

    def _turn_away(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer a request without reading it; further data on the connection is dropped."""
        self._release_body()
        turned_away = self._server.turned_away
        turned_away[status] = turned_away.get(status, 0) + 1
        self._transport.write(_refusal(status, headers, body))
        self._linger()

    def _linger(self) -> None:
        """Close after the written data, once the client has had time to read it."""
        self._reading = False
        self._buffer.clear()
        server = self._server
        if self._transport.is_closing():
            self.deadline = server.connections.now + LINGER_S
            return
        last = Lingering(server.connections, server.limits, self._transport, self._backlog)
        server.connections.replace(self, last)
        self._transport.set_protocol(cast(asyncio.Protocol, last))
        last.begin()


def _expects(head: Head, length: int) -> bool:
    """Whether the client waits for 100 Continue before it sends the body."""
    if head.fields[b"expect"].lower() != b"100-continue":
        raise Malformed("an unknown expectation", status=417)
    return bool(head.minor and length)


_RETRY = (b"retry-after", b"1")


def _refusal(status: int, headers: Headers, body: bytes) -> bytes:
    last = b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    return status_line(status) + write_fields(headers) + last + body
