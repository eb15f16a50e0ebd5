"""Buffers bytes from a client, and finds the heads of requests in them."""

from __future__ import annotations

import re

from rollout_sched.integrations.http.errors import Malformed
from rollout_sched.integrations.http.heads import END

_AUTHORITY = re.compile(rb"(?i)https?://[^/?]*")


class HeadBuffer:
    """Bytes from one client, cut where a request's head ends; a head has at most `most` bytes."""

    __slots__ = ("_most", "_searched", "_start", "data", "pos")

    def __init__(self, most: int) -> None:
        self.data = b""  # received; from pos on not yet processed
        self.pos = 0
        self._most = most
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
