"""A request as the app gets it, and the answer as the app gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rollout_sched.integrations.http.heads import (
    JOIN_BELOW,
    Head,
    Headers,
    has_body,
    status_line,
    write_fields,
)

_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"

#: What opens a chunk, by its size: looked up where it need not be written.
_SIZE_LINES = [b"%x\r\n" % size for size in range(4096)]


class Outlet(Protocol):
    """What a request asks of the connection it came on."""

    keep_alive: bool

    def send(self, data: bytes, more: bytes = b"") -> None: ...

    def complete(self) -> None:
        """The answer has been given."""


class Request:
    """One request, its whole body there; to be answered once, at once or later.

    Either `answer`, or `begin`, any number of `write` and `end`. Once the client is gone
    (`gone`), what is written goes nowhere, without an error.

    on_disconnect  called if the client goes away before the answer is complete
    on_pause       called if the client reads slower than `write` is called; what is written
    on_resume      until then is kept in memory, up to the server's limit
    """

    __slots__ = (
        "_chunked",
        "_head",
        "_outlet",
        "_state",
        "_with_body",
        "body",
        "gone",
        "method",
        "on_disconnect",
        "on_pause",
        "on_resume",
        "target",
    )

    def __init__(
        self, outlet: Outlet, method: bytes, target: bytes, head: Head, body: bytes
    ) -> None:
        self.method = method
        self.target = target
        self.body = body
        self.gone = False
        self.on_disconnect: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self._head = head
        self._outlet: Outlet | None = outlet
        self._state = _UNANSWERED
        self._chunked = self._with_body = False

    @property
    def begun(self) -> bool:
        """Whether any of the answer has been given."""
        return self._state is not _UNANSWERED

    @property
    def headers(self) -> Headers:
        """All fields in the order they came, names in lower case."""
        return self._head.headers

    @property
    def fields(self) -> Mapping[bytes, bytes]:
        """The same by lower-case name; repeated ones are joined with commas."""
        return self._head.fields

    def answer(
        self, status: int, headers: bytes | Sequence[tuple[bytes, bytes]], body: bytes
    ) -> None:
        """Give the whole answer.

        Content-Length and Connection are written here, so `headers` holds neither, nor
        Transfer-Encoding; as bytes they are lines, each with its CRLF.
        """
        head = status_line(status) + write_fields(headers)
        self._become(_UNANSWERED, _ANSWERED)
        outlet = self._outlet
        if outlet is None:
            return
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
            outlet.send(head, body)
        self._let_go()
        outlet.complete()

    def begin(self, status: int, headers: bytes | Sequence[tuple[bytes, bytes]]) -> None:
        """Begin an answer that is streamed. `headers` as for `answer`."""
        head = status_line(status) + write_fields(headers)
        self._become(_UNANSWERED, _STREAMING)
        outlet = self._outlet
        if outlet is None:
            return
        self._with_body = has_body(status) and self.method != b"HEAD"
        self._chunked = self._head.minor == 1
        if not self._chunked:
            outlet.keep_alive = False
        head += self._connection_field(outlet)
        outlet.send(head + (_CHUNKED if self._chunked and has_body(status) else b"\r\n"))

    def write(self, data: bytes) -> None:
        """Send a piece of a streamed answer."""
        if self._state is not _STREAMING:
            raise RuntimeError(f"the answer is {self._state}")
        if self._outlet is None or not self._with_body or not data:
            return
        if self._chunked:
            size = len(data)
            line = _SIZE_LINES[size] if size < len(_SIZE_LINES) else b"%x\r\n" % size
            self._outlet.send(line + data + b"\r\n")
        else:
            self._outlet.send(data)

    def end(self) -> None:
        """Complete a streamed answer."""
        self._become(_STREAMING, _ANSWERED)
        outlet = self._outlet
        if outlet is None:
            return
        if self._chunked and self._with_body:
            outlet.send(_LAST_CHUNK)
        self._let_go()
        outlet.complete()

    def lose(self) -> None:
        """The client is gone: called by the connection."""
        on_disconnect = self.on_disconnect
        self.gone = True
        self._let_go()
        if on_disconnect is not None:
            on_disconnect()

    def _become(self, old: str, new: str) -> None:
        if self._state is not old:
            raise RuntimeError(f"the answer is {self._state}")
        self._state = new

    def _connection_field(self, outlet: Outlet) -> bytes:
        if not outlet.keep_alive:
            return b"connection: close\r\n"
        return b"" if self._head.minor else b"connection: keep-alive\r\n"

    def _let_go(self) -> None:
        """Drop what refers back to us, so that nothing is left for the garbage collector."""
        self._outlet = self.on_disconnect = self.on_pause = self.on_resume = None


_UNANSWERED = "not begun"
_STREAMING = "being streamed"
_ANSWERED = "complete"
