"""One request and its answer, whichever connection carries it.

Invariants:
- after `on_error` or `Exchange.cancel` a receiver hears nothing more, and after `on_end` neither,
  unless that raised;
- whatever a receiver raises ends its exchange, with one `on_error`, and nobody else's.
"""

from __future__ import annotations

import logging
from typing import Protocol

from rollout_sched.integrations.http.errors import RAISED
from rollout_sched.integrations.http.heads import Headers

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Gets an answer as it arrives: one head, data, and then one end or one error.

    What a callback raises is told to `on_error`, as AnswerBroken unless it is an ExchangeError
    itself, and closes the connection. What `on_error` raises is logged.
    """

    def on_head(self, status: int, headers: Headers) -> None: ...

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_error(self, error: Exception) -> None: ...


class Carrier(Protocol):
    """What an exchange asks of the connection that carries it."""

    def drop(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Exchange:
    """One request on its way and its answer."""

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
        self.head = head  # the request, kept as long as it may have to be sent again
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
        """Whether its end, its error or its cancelling is behind it."""
        return self.receiver is None

    def cancel(self) -> None:
        """Close the connection, so that the server sees the client go. No callback follows."""
        connection = self.connection
        self.receiver = self.connection = None
        if connection is not None:
            connection.drop()

    def pause(self) -> None:
        """Stop reading the answer, so that the server has to wait.

        Meanwhile nobody notices if the server goes away.
        """
        self.paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        """Read on."""
        self.paused = False
        if self.connection is not None:
            self.connection.resume()

    def finish(self) -> Receiver:
        """Let go of everything; returns the receiver, for its last word."""
        receiver = self.receiver
        assert receiver is not None
        self.receiver = self.connection = None
        self.head = self.body = b""
        return receiver

    def fail(self, error: Exception) -> None:
        """End with an error."""
        tell(self.finish(), error)


def tell(receiver: Receiver, error: Exception) -> None:
    """A receiver's last word. Who cannot bear it must not keep others from hearing theirs."""
    try:
        receiver.on_error(error)
    except RAISED:
        log.exception("an exchange failed (%s), and to say so failed too", error)
