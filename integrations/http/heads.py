"""Reads (strictly) and writes the head of an HTTP/1.1 message: start line and fields.

A head is read line by line, and parsed lines are cached: nearly all lines repeat from message to
message, so that a head costs a split and a few lookups. Heads of requests are cached as a whole,
because clients repeat them. The grammar is RFC 9112 without its leniencies: bare line feeds, folded
lines, space before a colon and repeated framing fields are refused, because each of them can make
two servers disagree about where a message ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

from rollout_sched.integrations.http.errors import Malformed
from rollout_sched.integrations.http.parse_cache import ParseCache

Headers = list[tuple[bytes, bytes]]

#: Up to this size in bytes, appending a body to its head is cheaper than writing two buffers.
JOIN_BELOW: Final = 32 * 1024

#: Body lengths that are not a number of bytes.
CHUNKED: Final = -1
UNTIL_CLOSE: Final = -2
_UNSAID: Final = -3
_UNREAD: Final = -4

END: Final = b"\r\n\r\n"
_CRLF: Final = b"\r\n"

#: Most header lines of a message, and most lines of trailers. A head costs by its lines: with 8,000
#: short lines it would cost a thousand times as much as an ordinary one.
MAX_LINES: Final = 100

#: Longest line and longest head that are cached, in bytes.
MAX_CACHED_LINE = 256
MAX_CACHED_HEAD = 1024

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_TEXT = rb"[^\x00-\x08\n-\x1f\x7f]*"
_REQUEST = re.compile(rb"(%b) ([!-~]+) HTTP/1\.([01])" % TOKEN)
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: %b)?" % _TEXT)
_FIELD = re.compile(rb"(%b):(%b)" % (TOKEN, _TEXT))
FRAMING = (b"content-length", b"transfer-encoding")
_ONCE = (*FRAMING, b"host")

#: Status lines by status.
STATUS_LINE = {
    s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode("ascii")) for s in HTTPStatus
}


class Head:
    """Fields of a message by lower-case name, in order (`headers`) and by name (`fields`)."""

    __slots__ = ("_length", "fields", "headers", "minor")

    def __init__(self, minor: int, headers: Headers) -> None:
        self.minor = minor
        self.headers = headers
        self._length = _UNREAD
        self.fields = dict(headers)
        if len(self.fields) != len(headers):
            self.fields = _joined(headers)

    @property
    def keep_alive(self) -> bool:
        """Whether the sender accepts another message on this connection."""
        value = self.fields.get(b"connection")
        if value is None:
            return self.minor == 1
        options = [o.strip() for o in value.lower().split(b",")]
        return b"close" not in options and (self.minor == 1 or b"keep-alive" in options)

    def length(self, otherwise: int) -> int:
        """Bytes of the body, or CHUNKED; `otherwise` if the fields do not give the length."""
        length = self._length
        if length == _UNREAD:
            length = self._length = self._read_length()
        return otherwise if length == _UNSAID else length

    def _read_length(self) -> int:
        coding = self.fields.get(b"transfer-encoding")
        length = self.fields.get(b"content-length")
        if coding is None:
            if length is None:
                return _UNSAID
            if not length.isdigit() or len(length) > 18:
                raise Malformed("Content-Length is not a number")
            return int(length)
        if length is not None:
            raise Malformed("both Content-Length and Transfer-Encoding")
        if self.minor == 0:
            raise Malformed("Transfer-Encoding in HTTP/1.0")
        if coding.lower() != b"chunked":
            raise Malformed("Transfer-Encoding is not chunked", status=501)
        return CHUNKED


def read_request(head: bytes) -> tuple[bytes, bytes, Head]:
    """Method, target and fields of a request head, given without the empty line that ends it.

    Equal heads may give the same `Head` object, which must not be changed.
    """
    return _request_heads[head]


def _read_request_head(head: bytes) -> tuple[bytes, bytes, Head]:
    first, *lines = _split(head, MAX_LINES + 1)
    method, target, minor = _request_lines[first]
    return method, target, Head(minor, [_field_lines[line] for line in lines])


def read_response(head: bytes) -> tuple[int, Head]:
    """Status and fields of a response head, given without the empty line that ends it."""
    first, *lines = _split(head, MAX_LINES + 1)
    status, minor = _status_lines[first]
    return status, Head(minor, [_field_lines[line] for line in lines])


def read_fields(block: bytes) -> Headers:
    """Fields alone, given without the empty line that ends them."""
    return [_field_lines[line] for line in _split(block, MAX_LINES)]


def _split(block: bytes, limit: int) -> list[bytes]:
    lines = block.split(_CRLF, limit)
    if len(lines) > limit:
        raise Malformed(f"more than {MAX_LINES} header lines", status=431)
    return lines


def _read_request_line(line: bytes) -> tuple[bytes, bytes, int]:
    found = _REQUEST.fullmatch(line)
    if found is None:
        raise Malformed("not an HTTP/1.1 request line")
    return found[1], found[2], int(found[3])


def _read_status_line(line: bytes) -> tuple[int, int]:
    found = _STATUS.fullmatch(line)
    if found is None:
        raise Malformed("not an HTTP/1.1 status line")
    return int(found[2]), int(found[1])


def _read_field_line(line: bytes) -> tuple[bytes, bytes]:
    found = _FIELD.fullmatch(line)
    if found is None:
        raise Malformed("a header line is malformed")
    return found[1].lower(), found[2].strip(b" \t")


_request_lines = ParseCache(_read_request_line, MAX_CACHED_LINE)
_status_lines = ParseCache(_read_status_line, MAX_CACHED_LINE)
_field_lines = ParseCache(_read_field_line, MAX_CACHED_LINE)
_request_heads = ParseCache(_read_request_head, MAX_CACHED_HEAD)


def is_request_line(line: bytes) -> bool:
    return _REQUEST.fullmatch(line) is not None


def _joined(headers: Headers) -> dict[bytes, bytes]:
    """Repeated fields as one list (RFC 9110, 5.3); those that may not repeat are refused."""
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        if name not in fields:
            fields[name] = value
        elif name in _ONCE:
            raise Malformed(f"more than one {name.decode()}")
        else:
            fields[name] += b", " + value
    return fields


def write_fields(headers: bytes | Sequence[tuple[bytes, bytes]]) -> bytes:
    """Header lines, each with its line end. `headers` as bytes are lines already, and unchanged.

    Raises ValueError if a name or value contains a line break.
    """
    if isinstance(headers, bytes):
        return headers
    block = b"".join([b"%b: %b\r\n" % field for field in headers])
    if block.count(b"\n") != len(headers) or block.count(b"\r") != len(headers):
        raise ValueError("a header name or value contains a line break")
    return block


def status_line(status: int) -> bytes:
    return STATUS_LINE.get(status) or b"HTTP/1.1 %d \r\n" % status


def has_body(status: int) -> bool:
    """Whether an answer with this status has a body (RFC 9110, 6.4.1)."""
    return status >= 200 and status != 204 and status != 304


_AUTHORITY = re.compile(rb"(?i)https?://[^/?]*")


class HeadBuffer:
    """Bytes from one client, cut where a request's head ends; a head has at most `most` bytes."""

    __slots__ = ("_most", "_searched", "_start", "data", "pos")

    def __init__(self, limit: int) -> None:
        self.data = b""  # received; from pos on not yet processed
        self.pos = 0
        self._most = limit
        self._start = 0  # start of the last head
        self._searched = 0  # bytes from pos on in which no head ends

    def feed(self, data: bytes) -> None:
        if self.pos < len(self.data):
            data = self.data[self.pos :] + data
        self.data = data
        self.pos = 0

    def head(self) -> bytes | None:
        """The next head, without the empty line that ends it; None if it is not complete. Raises
        Malformed.
        """
        data = self.data
        begin = start = self.pos
        if data.startswith(b"\r\n", start):  # one CRLF is allowed between requests (RFC 9112, 2.2)
            start += 2
        head_end = data.find(END, start + self._searched)
        if head_end < 0:
            if len(data) - begin >= self._most:
                raise self._too_long()
            self._searched = max(0, len(data) - start - len(END))
            return None
        end = head_end + len(END)
        if end - begin > self._most:
            raise self._too_long()
        self._start = start
        self._searched = 0
        self.pos = end
        return data[start:head_end]

    def body(self, length: int) -> bytes:
        """A body of `length` bytes, which must all have arrived."""
        end = self.pos + length
        body = self.data[self.pos : end]
        if end < len(self.data):
            self.pos = end
        else:
            self.data = b""
            self.pos = 0
        return body

    def rest(self) -> bytes:
        """All bytes after the last head; they are not kept."""
        rest = self.data[self.pos :]
        self.data = b""
        self.pos = 0
        return rest

    def last_head(self) -> bytes:
        """The last head, unchanged."""
        return self.data[self._start : self.pos]

    def clear(self) -> None:
        self.data = b""
        self.pos = 0

    def cut_authority(self, method: bytes, asked: bytes) -> bytes:
        """The path of an absolute target in the last head (RFC 9112, 3.2.2).

        It replaces the target in the buffer, so that the fallback reads the same. Raises Malformed.
        """
        target = _AUTHORITY.sub(b"", asked, count=1) or b"/"
        if not target.startswith(b"/"):
            raise Malformed("the target is neither a path nor an http URL")
        at = self._start + len(method) + 1
        self.data = self.data[:at] + target + self.data[at + len(asked) :]
        self.pos += len(target) - len(asked)
        return target

    def _too_long(self) -> Malformed:
        return Malformed(f"the head is longer than {self._most} bytes", status=431)


#: Longest head of an answer, in bytes, with the empty line that ends it.
MAX_HEAD: Final = 64 * 1024

#: Most interim answers (1xx) before the answer itself.
MAX_INTERIM: Final = 16


class AnswerHeads:
    """Reads the heads of the answers on one connection, one after the other, and skips interim
    answers (1xx).

    status, head  of the last answer whose head was read
    rest          the bytes received after that head; the caller takes them
    interim       interim answers since then
    """

    __slots__ = ("_data", "head", "interim", "rest", "status")

    def __init__(self) -> None:
        self._data = b""  # the received part of a head
        self.interim = 0
        self.status = 0
        self.rest = b""
        self.head: Head

    @property
    def begun(self) -> bool:
        """Whether any part of the next answer has arrived."""
        return bool(self._data) or self.interim > 0

    def read(self, data: bytes) -> bool:
        """Whether the head of an answer is now complete. Raises Malformed."""
        searched = 0
        if self._data:
            searched = max(0, len(self._data) - len(END))
            data = self._data + data
            self._data = b""
        while True:
            end = data.find(END, searched)
            if (len(data) + 1 if end < 0 else end + len(END)) > MAX_HEAD:
                raise Malformed(f"its head is longer than {MAX_HEAD} bytes")
            if end < 0:
                self._data = data
                return False
            self.status, self.head = read_response(data[:end])
            data = data[end + len(END) :]
            if self.status >= 200:
                self.rest = data
                self.interim = 0
                return True
            self._pass_over()
            searched = 0

    def _pass_over(self) -> None:
        """Skip an interim answer."""
        length = self.head.length(UNTIL_CLOSE)
        if self.status == 101:
            raise Malformed("it switches to another protocol")
        if length != UNTIL_CLOSE and length:
            raise Malformed(f"a {self.status} announces a body")
        if not self.head.keep_alive:
            raise Malformed(f"a {self.status} closes the connection before the answer")
        self.interim += 1
        if self.interim > MAX_INTERIM:
            raise Malformed(f"more than {MAX_INTERIM} interim answers")
