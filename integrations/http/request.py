"""A received request, with the methods by which the app answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from rollout_sched.integrations.http.errors import RAISED, report
from rollout_sched.integrations.http.heads import (
    JOIN_BELOW,
    Head,
    Headers,
    has_body,
    status_line,
    write_fields,
)

_CODING: Final = b"transfer-encoding: chunked\r\n\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"

#: First lines of chunks by size: a lookup is cheaper than formatting.
_SIZE_LINES = [b"%x\r\n" % size for size in range(4096)]


class ConnectionCallbacks(Protocol):
    """What a request needs from its connection."""

    keep_alive: bool
    peer: str

    def send(self, data: bytes) -> None: ...

    def send_both(self, head: bytes, body: bytes) -> None:
        """Send a head and a body with two writes, for a body that is cheaper to write separately
        than to copy."""

    def complete(self) -> None:
        """The answer is complete."""

    def drop(self) -> None:
        """Close at once."""


class ReceivedRequest:
    """One request with its complete body; to be answered once, at once or later.

    Call either `answer`, or `begin`, any number of `write`, and `end`. After the client has
    disconnected (`disconnected`), written data is dropped without an error.

    peer           the client's address, without its port; an IPv6 network of 64 bits
    on_disconnect  called if the client disconnects before the answer is complete
    on_pause       called if the client reads more slowly than the app writes; unread data is kept
                   in memory, up to the server's limit
    on_resume      called when the client reads again
    """

    __slots__ = (
        "_framing",
        "_head",
        "_outlet",
        "_state",
        "body",
        "disconnected",
        "method",
        "on_disconnect",
        "on_pause",
        "on_resume",
        "peer",
        "target",
    )

    def __init__(
        self, outlet: ConnectionCallbacks, method: bytes, target: bytes, head: Head, body: bytes
    ) -> None:
        self.method = method
        self.target = target
        self.body = body
        self.peer = outlet.peer
        self.disconnected = False
        self.on_disconnect: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self._head = head
        self._outlet: ConnectionCallbacks | None = outlet
        self._state = _UNANSWERED
        self._framing = _NO_BODY

    @property
    def begun(self) -> bool:
        """Whether the answer has begun."""
        return self._state is not _UNANSWERED

    @property
    def headers(self) -> Headers:
        """All fields in order of arrival, names in lower case."""
        return self._head.headers

    @property
    def fields(self) -> Mapping[bytes, bytes]:
        """The header fields by lower-case name; repeated ones are joined with commas."""
        return self._head.fields

    def answer(
        self, status: int, headers: bytes | Sequence[tuple[bytes, bytes]], body: bytes
    ) -> None:
        """Send the whole answer.

        The server writes Content-Length and Connection itself, so `headers` must not have them, nor
        Transfer-Encoding; `headers` as bytes are lines, each with its CRLF.
        """
        head = status_line(status) + write_fields(headers)
        if self._state is not _UNANSWERED:
            raise self._misused()
        self._state = _ANSWERED
        outlet = self._outlet
        if outlet is None:
            return
        if not (outlet.keep_alive and self._head.minor):
            head += self._connection_field(outlet)
        if has_body(status):
            head += b"content-length: %d\r\n\r\n" % len(body)
        else:
            head += b"\r\n"
            body = b""
        if self.method == b"HEAD":
            outlet.send(head)
        elif len(body) < JOIN_BELOW:
            outlet.send(head + body)
        else:
            outlet.send_both(head, body)
        self._let_go()
        outlet.complete()

    def begin(self, status: int, headers: bytes | Sequence[tuple[bytes, bytes]]) -> None:
        """Begin a streamed answer. `headers` as in `answer`."""
        head = status_line(status) + write_fields(headers)
        if self._state is not _UNANSWERED:
            raise self._misused()
        self._state = _STREAMING
        outlet = self._outlet
        if outlet is None:
            return
        chunked = self._head.minor == 1
        if not chunked:
            outlet.keep_alive = False
        if has_body(status) and self.method != b"HEAD":
            self._framing = _CHUNKED if chunked else _UNTIL_CLOSE
        head += self._connection_field(outlet)
        outlet.send(head + (_CODING if chunked and has_body(status) else b"\r\n"))

    def write(self, data: bytes) -> None:
        """Send more of a streamed answer."""
        if self._state is not _STREAMING:
            raise self._misused()
        outlet = self._outlet
        if outlet is None or not data:
            return
        if self._framing is _CHUNKED:
            size = len(data)
            line = _SIZE_LINES[size] if size < len(_SIZE_LINES) else b"%x\r\n" % size
            outlet.send(line + data + b"\r\n")
        elif self._framing is _UNTIL_CLOSE:
            outlet.send(data)

    def end(self) -> None:
        """Complete a streamed answer."""
        if self._state is not _STREAMING:
            raise self._misused()
        self._state = _ANSWERED
        outlet = self._outlet
        if outlet is None:
            return
        if self._framing is _CHUNKED:
            outlet.send(_LAST_CHUNK)
        self._let_go()
        outlet.complete()

    # Called by the connection.

    def pause(self) -> None:
        """The client does not read for now."""
        if self.on_pause is not None:
            self._tell(self.on_pause)

    def resume(self) -> None:
        """The client reads again."""
        if self.on_resume is not None:
            self._tell(self.on_resume)

    def fail(self) -> None:
        """The app has failed: answer 500 if the answer has not begun, else drop the connection."""
        outlet = self._outlet
        if outlet is None:
            return
        if self._state is _UNANSWERED:
            self.answer(500, (), b"")
        else:
            outlet.drop()

    def lose(self) -> None:
        """The client is gone."""
        on_disconnect = self.on_disconnect
        self.disconnected = True
        self._let_go()
        if on_disconnect is not None:
            on_disconnect()

    def _tell(self, what: Callable[[], None]) -> None:
        """Call a callback of the app."""
        try:
            what()
        except RAISED as error:
            report(f"pausing or resuming {self.method!r} {self.target!r}", error)
            # If aborted in `resume_writing`, asyncio's transport would report the loss twice.
            asyncio.get_running_loop().call_soon(self.fail)

    def _misused(self) -> RuntimeError:
        """The error for a call that the state of the answer does not allow."""
        return RuntimeError(f"the answer is {self._state}")

    def _connection_field(self, outlet: ConnectionCallbacks) -> bytes:
        if not outlet.keep_alive:
            return b"connection: close\r\n"
        return b"" if self._head.minor else b"connection: keep-alive\r\n"

    def _let_go(self) -> None:
        """Drop references that form cycles, so that nothing is left for the garbage collector."""
        self._outlet = self.on_disconnect = self.on_pause = self.on_resume = None


#: The framing of a streamed answer's body.
_NO_BODY: Final = "none"
_CHUNKED: Final = "chunked"
_UNTIL_CLOSE: Final = "until close"

_UNANSWERED: Final = "not begun"
_STREAMING: Final = "being streamed"
_ANSWERED: Final = "complete"
