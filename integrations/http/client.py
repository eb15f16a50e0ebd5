"""Keep-alive connections to one instance; answers by callback, or as a whole."""

from __future__ import annotations

import asyncio
import ssl as tls
from collections.abc import Sequence
from typing import Final, NamedTuple, cast
from urllib.parse import urlsplit

from rollout_sched.integrations.http.client_connection import (
    ClientConnection,
    Exchange,
    Receiver,
)
from rollout_sched.integrations.http.errors import AnswerBroken, NotConnected
from rollout_sched.integrations.http.heads import Headers, is_request_line, write_fields

#: Request lines that are cached; a gateway uses only a few targets.
MAX_OPENINGS: Final = 256


class Origin:
    """The server to which the requests of a pool go. Scheme, host and port of a base URL, and the
    path that is prepended to every target.

    `ssl` is for https; None: the system's trusted authorities. Raises ValueError if `url` is not a
    base URL.
    """

    __slots__ = ("_authority", "_openings", "_prefix", "host", "port", "ssl")

    def __init__(self, url: str, ssl: tls.SSLContext | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL like http://host:port")
        if parts.query or parts.fragment or parts.username is not None:
            raise ValueError(f"{url!r}: a base URL has only a scheme, a host, a port and a path")
        secure = parts.scheme == "https"
        self.host = parts.hostname
        self.port = parts.port or (443 if secure else 80)
        self.ssl = (ssl or tls.create_default_context()) if secure else None
        self._authority = parts.netloc
        self._prefix = parts.path.rstrip("/")
        self._openings: dict[tuple[str, str], bytes] = {}

    def opening(self, method: str, target: str) -> bytes:
        """The beginning of a request: its first line, and Host. Raises ValueError."""
        return self._openings.get((method, target)) or self._write(method, target)

    def _write(self, method: str, target: str) -> bytes:
        line = f"{method} {self._prefix}{target} HTTP/1.1".encode()
        if not target.startswith("/") or not is_request_line(line):
            raise ValueError(f"{method!r} and {target!r} do not make a request line")
        if len(self._openings) >= MAX_OPENINGS:
            self._openings.clear()
        opening = b"%b\r\nhost: %b\r\n" % (line, self._authority.encode())
        self._openings[method, target] = opening
        return opening


class IdleConnections:
    """The idle connections of a pool; each is closed after `keepalive_s` seconds."""

    __slots__ = ("_idle", "_keepalive_s", "_loop", "_timer")

    def __init__(self, keepalive_s: float) -> None:
        # The time since which each is idle, the longest first.
        self._idle: dict[ClientConnection, float] = {}
        self._keepalive_s = keepalive_s
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop  # set with the first connection

    def put(self, connection: ClientConnection) -> None:
        if self._timer is None:
            self._loop = asyncio.get_running_loop()
            self._timer = self._loop.call_later(self._keepalive_s, self._close_old)
        connection.reused = True
        self._idle[connection] = self._loop.time()

    def carry(self, exchange: Exchange) -> bool:
        """Send an exchange on an idle connection. False if there is none."""
        while self._idle:
            connection, since = self._idle.popitem()  # the most recent, so that others can expire
            now = self._loop.time()
            if now - since >= self._keepalive_s:
                connection.drop()
            elif connection.usable():
                exchange.sent_at = now
                connection.carry(exchange)
                return True
            # Otherwise it is about to read data that closes it.
        return False

    def forget(self, connection: ClientConnection) -> None:
        self._idle.pop(connection, None)

    def close(self) -> None:
        """Stop the timer; the pool closes the connections."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_old(self) -> None:
        """Close connections that were idle too long, and set the timer for the next one."""
        now = self._loop.time()
        self._timer = None
        while self._idle:
            oldest = next(iter(self._idle))
            left = self._idle[oldest] + self._keepalive_s - now
            if left > 0:
                self._timer = self._loop.call_later(left, self._close_old)
                return
            del self._idle[oldest]
            oldest.drop()


#: Most bytes of an answer's body if the caller sets no limit: an answer that announces more can
#: only be an error, and waiting for it would last as long as the connection.
MAX_BODY = 64 * 2**30

#: Methods whose requests have no Content-Length if they have no body.
_BODILESS = ("GET", "HEAD", "DELETE", "OPTIONS")


class HttpResponse(NamedTuple):
    """A whole answer; header names are lower-case."""

    status: int
    headers: Headers
    body: bytes


class Pool:
    """Connections to one instance, kept alive between requests.

    url          http:// or https://, host and port; its path is prepended to every target
    ssl          for https; None: the system's trusted authorities
    keepalive_s  seconds until an idle connection is closed; below the server's limit (uvicorn: 5 s)
    connect_s    timeout for opening a connection, in seconds
    max_answer   most bytes of body that `request` accepts
    dead_s       seconds after which a server that no longer answers even on TCP counts as gone, as
                 after a crash of its machine or behind a NAT that has dropped the connection; 0
                 leaves that to the system. The same holds for a server that reads nothing of a
                 request that does not fit its buffers

    `unasked` counts the connections dropped because data arrived without a request.
    """

    def __init__(
        self,
        url: str,
        *,
        ssl: tls.SSLContext | None = None,
        keepalive_s: float = 4.0,
        connect_s: float = 5.0,
        max_answer: int = 256 * 1024 * 1024,
        dead_s: float = 30.0,
    ) -> None:
        self.url = url
        self.unasked = 0
        self.dead_s = dead_s
        self._origin = Origin(url, ssl)
        self._max_answer = max_answer
        self._connections: dict[ClientConnection, None] = {}  # in the order of their creation
        self._idle = IdleConnections(keepalive_s)
        self._connect_s = connect_s
        self._dialling: dict[asyncio.Task[None], Exchange] = {}  # each opens a connection
        self._closed = False

    def send(
        self,
        method: str,
        target: str,
        headers: bytes | Sequence[tuple[bytes, bytes]],
        body: bytes,
        receiver: Receiver,
        limit: int = MAX_BODY,
        *,
        alone: bool = False,
    ) -> Exchange:
        """Send a request; every callback comes after this has returned.

        The client writes Host and Content-Length itself, so `headers` must not have them; `headers`
        as bytes are lines, each with its CRLF. `limit`: bytes of body that the answer may have; an
        answer that announces or has more is broken. `alone`: on a connection that carries nothing
        else, for an answer that does not show whose it is. Raises ValueError for a target or header
        with a line break, RuntimeError after `close`.
        """
        if self._closed:
            raise RuntimeError(f"{self.url}: the pool is closed")
        opening = self._origin.opening(method, target)
        lines = headers if isinstance(headers, bytes) else write_fields(headers)
        if body or method not in _BODILESS:
            head = b"%b%bcontent-length: %d\r\n\r\n" % (opening, lines, len(body))
        else:
            head = b"%b%b\r\n" % (opening, lines)
        exchange = Exchange(head, body, method == "HEAD", receiver, limit)
        exchange.reusable = not alone
        if alone or not self._idle.carry(exchange):
            self.dial(exchange)
        return exchange

    async def request(
        self,
        method: str,
        target: str,
        headers: bytes | Sequence[tuple[bytes, bytes]] = (),
        body: bytes = b"",
        timeout_s: float | None = None,
        *,
        alone: bool = False,
    ) -> HttpResponse:
        """Send a request and wait for its whole answer.

        Raises ExchangeError, or TimeoutError after `timeout_s` seconds.
        """
        whole = _Whole(asyncio.get_running_loop().create_future(), self._max_answer)
        exchange = self.send(method, target, headers, body, whole, self._max_answer, alone=alone)
        try:
            if timeout_s is None:  # even an unused timeout would cost as much as the parsing
                return await whole.future
            async with asyncio.timeout(timeout_s):
                return await whole.future
        finally:
            exchange.cancel()

    def close(self) -> None:
        """Close every connection; exchanges in flight end with an error."""
        self._closed = True
        self._idle.close()
        for task in self._dialling:
            task.cancel()
        for exchange in list(self._dialling.values()):
            self._refuse(exchange, "the pool was closed")
        for connection in list(self._connections):
            connection.fail(AnswerBroken(f"{self.url}: the pool was closed"))

    # Called by the connections of this pool.

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def joined(self, connection: ClientConnection, first: Exchange | None) -> None:
        """A connection was opened; `first` is the exchange it was opened for."""
        self._connections[connection] = None
        if first is not None and first.paused:
            # uvloop begins to read when this returns, so pausing before that has no effect.
            asyncio.get_running_loop().call_soon(self._carry_first, connection, first)
        else:
            self._carry_first(connection, first)

    def _carry_first(self, connection: ClientConnection, first: Exchange | None) -> None:
        if first is None or first.done:
            self.release(connection)
        else:
            first.sent_at = self.now()
            connection.carry(first)

    def release(self, connection: ClientConnection) -> None:
        """Keep a connection whose exchange has ended for the next exchange."""
        if self._closed:
            connection.drop()
            return
        self._idle.put(connection)

    def left(self, connection: ClientConnection) -> None:
        self._connections.pop(connection, None)
        self._idle.forget(connection)

    def dial(self, exchange: Exchange) -> None:
        """Carry an exchange on a new connection."""
        task = asyncio.get_running_loop().create_task(self._dial(exchange))
        self._dialling[task] = exchange
        task.add_done_callback(self._dialling.pop)

    async def _dial(self, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        connection = ClientConnection(self, exchange)
        made = False
        try:
            async with asyncio.timeout(self._connect_s):
                await loop.create_connection(
                    lambda: cast(asyncio.Protocol, connection),
                    self._origin.host,
                    self._origin.port,
                    ssl=self._origin.ssl,
                )
            made = True
        except TimeoutError:
            self._refuse(exchange, f"no connection within {self._connect_s:g} s")
        except Exception as error:  # the exchange must end, whatever a resolver or TLS raises
            self._refuse(exchange, f"no connection: {error}")
        finally:
            if not made:  # uvloop does not report the loss of a connection that was just opened
                connection.connection_lost(ConnectionAbortedError("while it was opened"))

    def _refuse(self, exchange: Exchange, text: str) -> None:
        """End an exchange that no connection carries with an error."""
        if not exchange.done and exchange.connection is None:
            exchange.fail(NotConnected(f"{self.url}: {text}"))


class WholeAnswer:
    """A receiver that assembles an answer of at most `most` bytes (`client_connection.Receiver`).

    At the end exactly one of `arrived` and `on_error` is called, which a subclass defines. An
    answer that is too long ends the exchange.
    """

    __slots__ = ("_headers", "_left", "_most", "_parts", "_status")

    def __init__(self, limit: int) -> None:
        self._status = 0
        self._headers: Headers = []
        self._parts: list[bytes] = []  # most answers are one part, and joining one copies nothing
        self._left = self._most = limit

    def arrived(self, status: int, headers: Headers, body: bytes) -> None:
        raise NotImplementedError

    def on_error(self, error: Exception) -> None:
        raise NotImplementedError

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status
        self._headers = headers

    def on_data(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            self._parts.clear()
            raise AnswerBroken(f"the answer is longer than {self._most} bytes")
        self._parts.append(data)

    def on_end(self) -> None:
        self.arrived(self._status, self._headers, b"".join(self._parts))


class _Whole(WholeAnswer):
    """The answer that `Pool.request` waits for."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[HttpResponse], limit: int) -> None:
        super().__init__(limit)
        self.future = future

    def arrived(self, status: int, headers: Headers, body: bytes) -> None:
        if not self.future.done():
            self.future.set_result(HttpResponse(status, headers, body))

    def on_error(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
