"""Keep-alive connections to one instance; answers by callback, or as a whole."""

from __future__ import annotations

import asyncio
import ssl as tls
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from rollout_sched.integrations.http.client_connection import ClientConnection
from rollout_sched.integrations.http.dialler import Dialler
from rollout_sched.integrations.http.errors import AnswerBroken
from rollout_sched.integrations.http.exchange import Exchange, Receiver
from rollout_sched.integrations.http.heads import Headers, write_fields
from rollout_sched.integrations.http.idle_connections import IdleConnections
from rollout_sched.integrations.http.origin import Origin

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
    limit        connections at once, 0 for any number; exchanges beyond it wait
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
        limit: int = 0,
        max_answer: int = 256 * 1024 * 1024,
        dead_s: float = 30.0,
    ) -> None:
        self.url = url
        self.unasked = 0
        self.dead_s = dead_s
        self._origin = Origin(url, ssl)
        self._limit = limit
        self._max_answer = max_answer
        self._connections: dict[ClientConnection, None] = {}  # in the order of their creation
        self._idle = IdleConnections(keepalive_s)
        self._dialler = Dialler(self, self._origin, connect_s, self._start_waiting)
        self._waiting: deque[Exchange] = deque()
        self._closed = False

    def send(
        self,
        method: str,
        target: str,
        headers: bytes | Sequence[tuple[bytes, bytes]],
        body: bytes,
        receiver: Receiver,
        most: int = MAX_BODY,
    ) -> Exchange:
        """Send a request; every callback comes after this has returned.

        Host and Content-Length are written here, so `headers` must not have them; `headers` as
        bytes are lines, each with its CRLF. `most`: bytes of body that the answer may have; an
        answer that announces or has more is broken. Raises ValueError for a target or header with
        a line break, RuntimeError after `close`.
        """
        if self._closed:
            raise RuntimeError(f"{self.url}: the pool is closed")
        opening = self._origin.opening(method, target)
        lines = headers if isinstance(headers, bytes) else write_fields(headers)
        if body or method not in _BODILESS:
            head = b"%b%bcontent-length: %d\r\n\r\n" % (opening, lines, len(body))
        else:
            head = b"%b%b\r\n" % (opening, lines)
        exchange = Exchange(head, body, method == "HEAD", receiver, most)
        self._start(exchange)
        return exchange

    async def request(
        self,
        method: str,
        target: str,
        headers: bytes | Sequence[tuple[bytes, bytes]] = (),
        body: bytes = b"",
        timeout_s: float | None = None,
    ) -> HttpResponse:
        """Send a request and wait for its whole answer.

        Raises ExchangeError, or TimeoutError after `timeout_s` seconds.
        """
        whole = _Whole(asyncio.get_running_loop().create_future(), self._max_answer)
        exchange = self.send(method, target, headers, body, whole, self._max_answer)
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
        self._dialler.close("the pool was closed")
        for exchange in list(self._waiting):
            self._dialler.refuse(exchange, "the pool was closed")
        self._waiting.clear()
        for connection in list(self._connections):
            connection.fail(AnswerBroken(f"{self.url}: the pool was closed"))

    # Called by the connections of this pool (client_connection.ConnectionOwner).

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def joined(self, connection: ClientConnection, first: Exchange | None) -> None:
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
        self._idle.keep(connection)
        if self._waiting:
            self._start_waiting()

    def left(self, connection: ClientConnection) -> None:
        self._connections.pop(connection, None)
        self._idle.forget(connection)
        self._start_waiting()

    def dial(self, exchange: Exchange) -> None:
        self._dialler.dial(exchange)

    def _start(self, exchange: Exchange) -> None:
        if self._idle.carry(exchange):
            return
        if self._has_room():
            self._dialler.dial(exchange)
        else:
            self._waiting.append(exchange)

    def _start_waiting(self) -> None:
        while self._waiting and (len(self._idle) or self._has_room()):
            exchange = self._waiting.popleft()
            if not exchange.done:
                self._start(exchange)

    def _has_room(self) -> bool:
        return not self._limit or len(self._connections) + len(self._dialler) < self._limit


class WholeAnswer:
    """A receiver that assembles an answer of at most `most` bytes (exchange.Receiver).

    At the end exactly one of `arrived` and `on_error` is called, which a subclass defines. An
    answer that is too long ends the exchange.
    """

    __slots__ = ("_headers", "_left", "_most", "_parts", "_status")

    def __init__(self, most: int) -> None:
        self._status = 0
        self._headers: Headers = []
        self._parts: list[bytes] = []  # most answers are one part, and joining one copies nothing
        self._left = self._most = most

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

    def __init__(self, future: asyncio.Future[HttpResponse], most: int) -> None:
        super().__init__(most)
        self.future = future

    def arrived(self, status: int, headers: Headers, body: bytes) -> None:
        if not self.future.done():
            self.future.set_result(HttpResponse(status, headers, body))

    def on_error(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
