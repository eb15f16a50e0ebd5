"""Reads the body of an HTTP/1.1 message from the packets it arrives in.

Every framing has `feed(data) -> (payload, rest)`: `rest` is None until the body ends, and then the
bytes after its end. A body that is too long is refused as soon as it announces its size, not when
the bytes have arrived.
"""

from __future__ import annotations

import re

from rollout_sched.integrations.http.errors import Malformed
from rollout_sched.integrations.http.heads import (
    CHUNKED,
    END,
    FRAMING,
    TOKEN,
    UNTIL_CLOSE,
    read_fields,
)

#: Longest line that opens a chunk, and longest block of trailers, in bytes; both with line ends.
MAX_CHUNK_LINE = 1024
MAX_TRAILERS = 16 * 1024

#: The cost of a chunk does not depend on its size: with one byte per chunk, a megabyte would cost
#: seconds. With `fair`, a body may have SPARE_CHUNKS chunks plus one for each FAIR_CHUNK bytes.
SPARE_CHUNKS = 1024
FAIR_CHUNK = 64

_QUOTED = rb'"(?:[^"\\\x00-\x08\n-\x1f\x7f]|\\[^\x00-\x08\n-\x1f\x7f])*"'
_EXTENSION = rb";%b(?:=(?:%b|%b))?" % (TOKEN, TOKEN, _QUOTED)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(?:%b)*\r\n" % _EXTENSION)
_CRLF = b"\r\n"

#: Sizes of chunks in their usual spelling; a lookup is cheaper than parsing.
_SIZES = {b"%x" % size: size for size in range(1, 4096)}


class Length:
    """A body of Content-Length bytes."""

    __slots__ = ("_left",)

    def __init__(self, length: int) -> None:
        self._left = length

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        left = self._left - len(data)
        if left < 0:
            self._left = 0
            return data[:left], data[left:]
        self._left = left
        return data, None if left else b""


class UntilClose:
    """A body that ends when the connection closes, at most `most` bytes."""

    __slots__ = ("_most", "_room")

    def __init__(self, limit: int) -> None:
        self._most = self._room = limit

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        self._room -= len(data)
        if self._room < 0:
            raise too_long(self._most)
        return data, None


class Chunked:
    """Transfer-Encoding: chunked, at most `most` bytes. Trailers are checked and dropped.

    `fair`: whether a body with too many very small chunks is refused.
    """

    __slots__ = ("_fair", "_held", "_left", "_most", "_room", "_spare", "_trailing")

    def __init__(self, limit: int, *, fair: bool) -> None:
        self._fair = fair
        self._spare = SPARE_CHUNKS
        self._most = self._room = limit  # _room: bytes that further chunks may announce
        self._held = b""  # framing that is not complete yet
        self._left = -1  # missing bytes of the open chunk; -1: no chunk is open
        self._trailing = False  # the last chunk has been seen

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        if self._left < 0 and not self._held:
            payload = _only_chunk(data)
            if payload:
                room = self._room = self._room - len(payload)
                if room < 0 or self._fair:
                    self._weigh(len(payload))
                return payload, None
        if self._held:
            data = self._held + data
            self._held = b""
        pos = 0
        parts: list[bytes] = []
        while not self._trailing:
            if self._left < 0:
                line = _CHUNK.match(data, pos)
                if line is None:
                    self._hold_line(data, pos)
                    return _join(parts), None
                if line.end() - pos > MAX_CHUNK_LINE:
                    raise Malformed("invalid chunk size")
                pos = line.end()
                self._left = int(line[1], 16)
                self._room -= self._left
                if self._fair or self._room < 0:
                    self._weigh(self._left)
                if not self._left:
                    self._trailing = True
                    break
            end = pos + self._left
            if pos < len(data) and self._left:
                parts.append(data[pos:end])
            if len(data) < end + 2:
                self._left = max(0, end - len(data))
                self._held = data[end:]
                return _join(parts), None
            if data[end : end + 2] != _CRLF:
                raise Malformed("a chunk is longer than its announced size")
            pos = end + 2
            self._left = -1
        return _join(parts), self._trailers(data, pos)

    def _weigh(self, size: int) -> None:
        """Refuse a chunk that makes the body too long, or one small chunk too many."""
        if self._room < 0:
            raise too_long(self._most)
        self._spare += size // FAIR_CHUNK - 1
        if self._spare < 0:
            raise Malformed("too many small chunks")

    def _hold_line(self, data: bytes, pos: int) -> None:
        self._held = data[pos:]
        if len(self._held) >= MAX_CHUNK_LINE or b"\n" in self._held:
            raise Malformed("invalid chunk size")

    def _trailers(self, data: bytes, pos: int) -> bytes | None:
        if data.startswith(_CRLF, pos):
            return data[pos + 2 :]
        end = data.find(END, pos)
        if (len(data) + 1 if end < 0 else end + len(END)) - pos > MAX_TRAILERS:
            raise Malformed("trailers are too long", status=431)
        if end < 0:
            self._held = data[pos:]
            return None
        for name, _ in read_fields(data[pos:end]):
            if name in FRAMING:  # a server that used it here would frame the message differently
                raise Malformed(f"{name.decode()} in a trailer")
        return data[end + 4 :]


Body = Length | Chunked | UntilClose


def body_of(length: int, limit: int, *, fair: bool) -> Body:
    """The framing for a length, CHUNKED or UNTIL_CLOSE; `fair` as in `Chunked`.

    Raises Malformed for a length of more than `most` bytes.
    """
    if length == CHUNKED:
        return Chunked(limit, fair=fair)
    if length == UNTIL_CLOSE:
        return UntilClose(limit)
    if length > limit:
        raise too_long(limit)
    return Length(length)


def too_long(limit: int) -> Malformed:
    return Malformed(f"the body is longer than {limit} bytes", status=413)


def _only_chunk(data: bytes) -> bytes:
    """The payload of a packet that is exactly one chunk, as most are; b"" if it is not."""
    line_end = data.find(_CRLF, 0, 8)
    if line_end < 0:
        return b""
    begin = line_end + 2
    end = begin + _SIZES.get(data[:line_end], 0)
    return data[begin:end] if data[end:] == _CRLF else b""


def _join(parts: list[bytes]) -> bytes:
    return parts[0] if len(parts) == 1 else b"".join(parts)


class BodyBudget:
    """Counts the bytes of request bodies in memory, over all connections of a server. `used` bytes
    of at most `most`, of bodies that are being read or processed.

    Code that keeps bytes of a body adds them to `used` and subtracts them afterwards. `refused`
    counts the bodies for which there was no room.
    """

    __slots__ = ("most", "refused", "used")

    def __init__(self, limit: int) -> None:
        self.most = limit
        self.used = 0
        self.refused = 0

    def full(self) -> Malformed:
        """Count a refused body; returns the error for it."""
        self.refused += 1
        return Malformed(f"{self.used} bytes of request bodies are in memory", status=503)
