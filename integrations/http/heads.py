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


def _split(block: bytes, most: int) -> list[bytes]:
    lines = block.split(_CRLF, most)
    if len(lines) > most:
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
