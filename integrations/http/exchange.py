"""One request and its answer, whichever connection carries it.

Invariants:
- a receiver gets no callback after `on_error` or `Exchange.cancel`, and none after `on_end` unless
  that raised;
- an exception of a receiver ends its own exchange, with one `on_error`, and no other exchange.
"""

from __future__ import annotations

import logging
from typing import Protocol

from rollout_sched.integrations.http.errors import RAISED
from rollout_sched.integrations.http.heads import Headers

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Gets an answer as it arrives: one head, data, and then one end or one error.

    An exception of a callback closes the connection and is passed to `on_error`, as AnswerBroken
    unless it is an ExchangeError itself. An exception of `on_error` is logged.
    """

    def on_head(self, status: int, headers: Headers) -> None: ...

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_error(self, error: Exception) -> None: ...


class Carrier(Protocol):
    """What an exchange needs from the connection that carries it."""

    def drop(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Exchange:
    """One request in flight and its answer."""

    __slots__ = (
        "body",
        "connection",
        "head",
        "head_only",
        "most",
        "paused",
        "receiver",
        "redialled",
        "sent_at",
    )

    def __init__(
        self, head: bytes, body: bytes, head_only: bool, receiver: Receiver, most: int
    ) -> None:
        self.head = head  # the request, kept while it may have to be sent again
        self.body = body
        self.head_only = head_only
        self.most = most  # bytes of body that the answer may have
        self.receiver: Receiver | None = receiver
        self.connection: Carrier | None = None
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
