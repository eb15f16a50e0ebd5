"""One connection to a server, which carries exchanges one after the other.

Invariants:
- a connection is idle, or carries one exchange, or is dropped;
- it is reused only if it followed the protocol: the answer ended at its announced end, nothing came
  after it, and the whole request had been written; and only if the exchange allows it.
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from rollout_sched.integrations.http.bodies import Body, UntilClose, body_of, too_long
from rollout_sched.integrations.http.errors import (
    RAISED,
    AnswerBroken,
    ExchangeError,
    Malformed,
    watch_peer,
)
from rollout_sched.integrations.http.heads import (
    JOIN_BELOW,
    UNTIL_CLOSE,
    AnswerHeads,
    Headers,
    has_body,
)

if TYPE_CHECKING:
    from rollout_sched.integrations.http.client import Pool

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------
# One request and its answer, whichever connection carries it.
#
# Invariants:
# - a receiver gets no callback after `on_error` or `Exchange.cancel`, and none after `on_end`
#   unless that raised;
# - an exception of a receiver ends its own exchange, with one `on_error`, and no other exchange.


class Receiver(Protocol):
    """Gets an answer as it arrives: one head, data, and then one end or one error.

    An exception of a callback closes the connection and is passed to `on_error`, as AnswerBroken
    unless it is an ExchangeError itself. An exception of `on_error` is logged.
    """

    def on_head(self, status: int, headers: Headers) -> None: ...

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_error(self, error: Exception) -> None: ...


class Exchange:
    """One request in flight and its answer.

    alone     its connection has carried no other exchange
    reusable  its connection may carry others after it. A server that answers twice sends the second
              answer at any time, also to the next request of the connection; so this is for
              answers that their receiver recognizes as its own. Decided before `on_end` returns
    """

    __slots__ = (
        "alone",
        "body",
        "connection",
        "head",
        "head_only",
        "most",
        "paused",
        "receiver",
        "redialled",
        "reusable",
        "sent_at",
    )

    def __init__(
        self, head: bytes, body: bytes, head_only: bool, receiver: Receiver, limit: int
    ) -> None:
        self.alone = True
        self.reusable = True
        self.head = head  # the request, kept while it may have to be sent again
        self.body = body
        self.head_only = head_only
        self.most = limit  # bytes of body that the answer may have
        self.receiver: Receiver | None = receiver
        self.connection: ClientConnection | None = None
        self.paused = False
        self.redialled = False
        self.sent_at = 0.0

    @property
    def done(self) -> bool:
        """Whether it has ended, failed or was cancelled."""
        return self.receiver is None

    def cancel(self) -> None:
        """Close the connection, so that the server sees the disconnect. No callback follows."""
        connection = self.connection
        self.receiver = self.connection = None
        if connection is not None:
            connection.drop()

    def pause(self) -> None:
        """Stop reading the answer, so that the server has to wait (backpressure).

        Until `resume`, a disconnect of the server is not noticed.
        """
        self.paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        """Continue reading."""
        self.paused = False
        if self.connection is not None:
            self.connection.resume()

    def finish(self) -> Receiver:
        """Drop all references; returns the receiver, for its last callback."""
        receiver = self.receiver
        assert receiver is not None
        self.receiver = self.connection = None
        self.head = self.body = b""
        return receiver

    def fail(self, error: Exception) -> None:
        """End with an error."""
        tell(self.finish(), error)


def tell(receiver: Receiver, error: Exception) -> None:
    """Call `on_error` of a receiver. Its exceptions must not affect other receivers."""
    try:
        receiver.on_error(error)
    except RAISED:
        log.exception("an exchange failed (%s), and its receiver's on_error failed too", error)


#: A server that closes an idle connection just as it is reused closes it within a round trip. A
#: server that closes later than this, in seconds, had the request and may have processed it, so the
#: request is not sent again without the scheduler's knowledge.
RACE_S = 1.0


class ClientConnection:
    """Sends requests one after the other and reads their answers.

    It has the methods of an `asyncio.Protocol` but does not inherit from it: a class that inherits
    from a class of the interpreter is not compiled (setup.py).
    """

    __slots__ = (
        "_body",
        "_exchange",
        "_first",
        "_heads",
        "_keep",
        "_on_data",
        "_owner",
        "_paused",
        "_readable",
        "_transport",
        "_used",
        "reused",
    )

    def __init__(self, owner: Pool, first: Exchange | None = None) -> None:
        self._owner = owner
        self._heads = AnswerHeads()
        self._first = first
        self._transport: asyncio.Transport
        self._readable: Callable[[int], list[tuple[int, int]]] | None = None
        self._exchange: Exchange | None = None
        self._body: Body | None = None  # None until the head of the answer has arrived
        self._on_data: Callable[[bytes], None] | None = None  # the receiver's, from then on
        self._keep = False
        self._paused = False
        self._used = False  # it has carried an exchange
        self.reused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        sock = transport.get_extra_info("socket")
        watch_peer(sock, self._owner.dead_s)
        # On a TLS socket the waiting data may be a record of TLS itself.
        if hasattr(select, "poll") and transport.get_extra_info("ssl_object") is None:
            poll = select.poll()
            poll.register(sock.fileno(), select.POLLIN)
            self._readable = poll.poll
        first, self._first = self._first, None
        self._owner.joined(self, first)

    def pause_writing(self) -> None:
        """Does nothing: requests are written as a whole."""

    def resume_writing(self) -> None:
        """Does nothing: requests are written as a whole."""

    def usable(self) -> bool:
        """Whether an idle connection can carry an exchange: it is open and has no data to read.

        Polling the socket costs half a microsecond. It detects a second answer, or the server's
        close, that has arrived but was not read yet, before the next request is sent.
        """
        if self._transport.is_closing():
            return False
        return self._readable is None or not self._readable(0)

    def carry(self, exchange: Exchange) -> None:
        """Send an exchange's request; the answer goes to its receiver."""
        self._exchange = exchange
        exchange.connection = self
        exchange.alone = not self._used
        self._used = True
        if exchange.paused:
            self.pause()
        if len(exchange.body) < JOIN_BELOW:
            self._transport.write(exchange.head + exchange.body)
        else:
            self._transport.writelines((exchange.head, exchange.body))
        if not self.reused:
            exchange.head = exchange.body = b""

    def drop(self) -> None:
        """Close at once. The exchange it carries is not notified."""
        self._exchange = self._on_data = None
        self._transport.abort()

    def pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self._unasked()
            return
        try:
            body = self._body
            if body is None:
                self._read_head(exchange, data)
            else:
                self._read_body(exchange, body, data)
        except Malformed as error:
            self._break(f"the answer is not valid: {error}", error)
        except RAISED as error:  # raised by the receiver
            if self._exchange is not None:
                self.fail(_as_error(self._owner.url, error))
            else:
                log.exception("%s: a receiver failed after it had cancelled", self._owner.url)

    def eof_received(self) -> None:
        self._closed(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed(exc)
        self._owner.left(self)

    def fail(self, error: Exception) -> None:
        """Close at once; the exchange it carries, if any, ends with an error."""
        exchange = self._exchange
        self.drop()
        if exchange is not None:
            exchange.fail(error)

    def _break(self, text: str, cause: BaseException | None) -> None:
        self.fail(_broken(self._owner.url, text, cause))

    def _read_head(self, exchange: Exchange, data: bytes) -> None:
        heads = self._heads
        if not heads.read(data):
            if heads.interim:  # the server has the request: it is not sent again
                exchange.head = exchange.body = b""
            return
        exchange.head = exchange.body = b""
        status, head, data = heads.status, heads.head, heads.rest
        heads.rest = b""
        length = head.length(UNTIL_CLOSE)
        self._keep = head.keep_alive
        if exchange.head_only or not has_body(status):
            if status == 204 and length != UNTIL_CLOSE and length:
                raise Malformed("a 204 announces a body")
            length = 0
        elif length > exchange.most:
            raise too_long(exchange.most)
        receiver = exchange.receiver
        assert receiver is not None
        receiver.on_head(status, head.headers)
        if not self._carries(exchange):
            return
        if len(data) == length:
            if data:
                receiver.on_data(data)
            if self._carries(exchange):
                self._end(exchange, b"")
        else:
            self._body = body = body_of(length, exchange.most, fair=False)
            self._on_data = receiver.on_data
            if data:
                self._read_body(exchange, body, data)

    def _read_body(self, exchange: Exchange, body: Body, data: bytes) -> None:
        payload, rest = body.feed(data)
        if payload:
            assert self._on_data is not None
            self._on_data(payload)
        if rest is not None and self._carries(exchange):
            self._end(exchange, rest)

    def _carries(self, exchange: Exchange) -> bool:
        """Whether its receiver has not cancelled it. A call, because mypyc takes an attribute that
        was compared before a call for unchanged after it."""
        return self._exchange is exchange

    def _end(self, exchange: Exchange, rest: bytes) -> None:
        """The answer is complete. Its receiver decides whether the connection is reused."""
        self._exchange = self._body = self._on_data = None
        receiver = exchange.finish()
        try:
            receiver.on_end()
        except RAISED as error:
            exchange.reusable = False
            tell(receiver, _as_error(self._owner.url, error))
        if rest:
            self._unasked()
        elif self._keep and exchange.reusable and not self._transport.get_write_buffer_size():
            if self._paused:
                self.resume()
            self._owner.release(self)
        else:
            self._transport.abort()

    def _unasked(self) -> None:
        """Bytes without a request: whatever they are, the connection must not be used again."""
        if not self._transport.is_closing():
            self._owner.unasked += 1
            log.warning("%s sent data without a request; connection closed", self._owner.url)
            self._transport.abort()

    def _closed(self, exc: Exception | None) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        body = self._body
        if isinstance(body, UntilClose) and exc is None:
            self._keep = False
            self._end(exchange, b"")
        elif body is not None:
            self._break(_because("the connection closed in the middle of the answer", exc), exc)
        elif self._may_redial(exchange):
            self.drop()
            exchange.connection = None
            exchange.redialled = True
            self._owner.dial(exchange)
        else:
            self._break(_because("the connection closed before the answer", exc), exc)

    def _may_redial(self, exchange: Exchange) -> bool:
        """Whether the server probably closed this connection before it was reused."""
        untouched = self.reused and not self._heads.begun
        recent = self._owner.now() - exchange.sent_at < RACE_S
        return untouched and recent and not exchange.redialled


def _broken(url: str, text: str, cause: BaseException | None) -> AnswerBroken:
    error = AnswerBroken(f"{url}: {text}")
    error.__cause__ = cause
    return error


def _as_error(url: str, raised: BaseException) -> Exception:
    """The error with which a receiver's own exception is reported to it."""
    if isinstance(raised, ExchangeError):
        return raised
    log.exception("%s: processing an answer failed", url)
    return _broken(url, f"processing the answer failed: {type(raised).__name__}", raised)


def _because(text: str, exc: Exception | None) -> str:
    return f"{text} ({exc})" if exc else text
