"""Keep-alive connections to one instance, and whole answers for those who want no callbacks."""

from __future__ import annotations

import asyncio
import ssl as tls
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from rollout_sched.integrations.http.errors import AnswerBroken, NotConnected
from rollout_sched.integrations.http.exchange import (
    Connection,
    Exchange,
    Receiver,
)
from rollout_sched.integrations.http.heads import Headers, is_request_line, write_fields

#: Request lines kept ready; a gateway asks for a handful of targets.
MAX_OPENINGS = 256

#: Bytes of body that an answer may have where the caller sets no bound of its own: what announces
#: more can only be an error, and would be waited for as long as the connection lives.
MAX_BODY = 64 * 2**30

#: Methods whose requests say nothing of a body when they have none.
_BODILESS = ("GET", "HEAD", "DELETE", "OPTIONS")


class Response(NamedTuple):
    """A whole answer; header names are lower-case."""

    status: int
    headers: Headers
    body: bytes


class Pool:
    """Connections to one instance, kept alive between requests.

    url          http:// or https://, host and port; a path is put before every target
    ssl          for https; None: what the system trusts
    keepalive_s  idle connections are closed after it; below what the server allows (uvicorn: 5 s)
    connect_s    seconds that a connection may take to come about
    limit        connections at once, 0 for any number; exchanges beyond it wait their turn
    max_answer   bytes of body that `request` takes
    dead_s       seconds after which a server that no longer answers even on TCP, as after a crash
                 of its machine or behind a NAT that has forgotten the connection, is taken for
                 gone; 0 leaves that to the system. So is one that reads nothing for so long of a
                 request that its buffers do not hold

    `unasked` counts the connections dropped because something came that nobody had asked for.
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
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL like http://host:port")
        if parts.query or parts.fragment or parts.username is not None:
            raise ValueError(f"{url!r}: a base URL is a scheme, a host, a port and a path")
        self.url = url
        self.unasked = 0
        self.dead_s = dead_s
        self._host = parts.hostname
        self._authority = parts.netloc
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = (ssl or tls.create_default_context()) if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self._keepalive_s = keepalive_s
        self._connect_s = connect_s
        self._limit = limit
        self._max_answer = max_answer
        self._openings: dict[tuple[str, str], bytes] = {}
        self._connections: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # ordered by when they became idle
        self._dialling: dict[asyncio.Task[None], Exchange] = {}
        self._waiting: deque[Exchange] = deque()
        self._reaper: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop  # there as soon as there is a connection
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

        Host and Content-Length are written here, so `headers` holds neither; as bytes they are
        lines, each with its CRLF. `most`: bytes of body that the answer may have; one that
        announces or brings more is broken. Raises ValueError for a target or header that would
        break out of its line, RuntimeError after `close`.
        """
        if self._closed:
            raise RuntimeError(f"{self.url}: the pool is closed")
        opening = self._openings.get((method, target)) or self._open(method, target)
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
    ) -> Response:
        """Send a request and wait for its whole answer.

        Raises ExchangeError, or TimeoutError after `timeout_s` seconds.
        """
        whole = _Whole(asyncio.get_running_loop().create_future(), self._max_answer)
        exchange = self.send(method, target, headers, body, whole, self._max_answer)
        try:
            if timeout_s is None:  # a timeout that never comes would cost as much as the parsing
                return await whole.future
            async with asyncio.timeout(timeout_s):
                return await whole.future
        finally:
            exchange.cancel()

    def close(self) -> None:
        """Close every connection; what is under way ends with an error."""
        self._closed = True
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        for task in self._dialling:
            task.cancel()
        for exchange in [*self._dialling.values(), *self._waiting]:
            self._refuse(exchange, "the pool was closed")
        self._waiting.clear()
        for connection in list(self._connections):
            connection.fail("the pool was closed")

    # What the connections of this pool ask of it (exchange.Home).

    def now(self) -> float:
        return self._loop.time()

    def joined(self, connection: Connection, first: Exchange | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._connections.add(connection)
        if first is not None and first.paused:
            # uvloop begins to read when this returns, whatever we say now.
            self._loop.call_soon(self._carry_first, connection, first)
        else:
            self._carry_first(connection, first)

    def _carry_first(self, connection: Connection, first: Exchange | None) -> None:
        if first is None or first.done:
            self.release(connection)
        else:
            first.sent_at = self._loop.time()
            connection.carry(first)

    def release(self, connection: Connection) -> None:
        """Keep a connection whose exchange is over for the next one."""
        if self._closed:
            connection.drop()
            return
        connection.reused = True
        connection.idle_since = self._loop.time()
        self._idle[connection] = None
        if self._waiting:
            self._start_waiting()
        elif self._reaper is None:
            self._reaper = self._loop.call_later(self._keepalive_s, self._reap)

    def left(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._idle.pop(connection, None)
        self._start_waiting()

    def dial(self, exchange: Exchange) -> None:
        """Carry an exchange on a new connection."""
        task = asyncio.get_running_loop().create_task(self._dial(exchange))
        self._dialling[task] = exchange
        task.add_done_callback(self._dialled)

    def _open(self, method: str, target: str) -> bytes:
        line = f"{method} {self._prefix}{target} HTTP/1.1".encode()
        if not target.startswith("/") or not is_request_line(line):
            raise ValueError(f"{method!r} and {target!r} do not make a request line")
        if len(self._openings) >= MAX_OPENINGS:
            self._openings.clear()
        opening = b"%b\r\nhost: %b\r\n" % (line, self._authority.encode())
        self._openings[method, target] = opening
        return opening

    def _start(self, exchange: Exchange) -> None:
        while self._idle:
            connection, _ = self._idle.popitem()  # the one used last, so that others can expire
            now = self._loop.time()
            if now - connection.idle_since >= self._keepalive_s:
                connection.drop()
            elif connection.usable():
                exchange.sent_at = now
                connection.carry(exchange)
                return
            # Otherwise it is about to read what ends it.
        if self._has_room():
            self.dial(exchange)
        else:
            self._waiting.append(exchange)

    def _start_waiting(self) -> None:
        while self._waiting and (self._idle or self._has_room()):
            exchange = self._waiting.popleft()
            if not exchange.done:
                self._start(exchange)

    def _has_room(self) -> bool:
        return not self._limit or len(self._connections) + len(self._dialling) < self._limit

    async def _dial(self, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        connection = Connection(self, exchange)
        made = False
        try:
            async with asyncio.timeout(self._connect_s):
                await loop.create_connection(
                    lambda: cast(asyncio.Protocol, connection),
                    self._host,
                    self._port,
                    ssl=self._ssl,
                )
            made = True
        except TimeoutError:
            self._refuse(exchange, f"no connection within {self._connect_s:g} s")
        except Exception as error:  # an exchange must end, whatever a resolver or TLS raises
            self._refuse(exchange, f"no connection: {error}")
        finally:
            if not made:  # uvloop does not say that it is lost if it had come about just now
                connection.connection_lost(ConnectionAbortedError("as it came about"))

    def _dialled(self, task: asyncio.Task[None]) -> None:
        del self._dialling[task]
        self._start_waiting()

    def _refuse(self, exchange: Exchange, text: str) -> None:
        if not exchange.done and exchange.connection is None:
            exchange.fail(NotConnected(f"{self.url}: {text}"))

    def _reap(self) -> None:
        """Close what has been idle too long, and look again when the next one will have been."""
        now = self._loop.time()
        self._reaper = None
        while self._idle:
            oldest = next(iter(self._idle))
            left = oldest.idle_since + self._keepalive_s - now
            if left > 0:
                self._reaper = self._loop.call_later(left, self._reap)
                return
            del self._idle[oldest]
            oldest.drop()


class Gathering:
    """A receiver that puts an answer of at most `most` bytes together (exchange.Receiver).

    Exactly one of `arrived` and `on_error`, which a subclass says, is called in the end. An answer
    that is too long ends the exchange.
    """

    __slots__ = ("_headers", "_left", "_most", "_parts", "_status")

    def __init__(self, most: int) -> None:
        self._status = 0
        self._headers: Headers = []
        self._parts: list[bytes] = []  # most answers are one, and joining one copies nothing
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


class _Whole(Gathering):
    """The answer that `Pool.request` waits for."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[Response], most: int) -> None:
        super().__init__(most)
        self.future = future

    def arrived(self, status: int, headers: Headers, body: bytes) -> None:
        if not self.future.done():
            self.future.set_result(Response(status, headers, body))

    def on_error(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
