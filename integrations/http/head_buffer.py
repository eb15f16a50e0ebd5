"""What a client has sent that was not looked at yet, and the heads of requests in it."""

from __future__ import annotations

import re

from rollout_sched.integrations.http.errors import Malformed
from rollout_sched.integrations.http.heads import END

_AUTHORITY = re.compile(rb"(?i)https?://[^/?]*")


class HeadBuffer:
    """Bytes from one client, cut where the head of a request ends, at most `most` bytes of it."""

    __slots__ = ("_most", "_searched", "_start", "data", "pos")

    def __init__(self, most: int) -> None:
        self.data = b""  # received and, from pos on, not yet looked at
        self.pos = 0
        self._most = most
        self._start = 0  # where the head that was cut last began
        self._searched = 0  # bytes from pos on in which no head ends

    def feed(self, data: bytes) -> None:
        if self.pos < len(self.data):
            data = self.data[self.pos :] + data
        self.data = data
        self.pos = 0

    def head(self) -> bytes | None:
        """The head that begins here, without the empty line that ends it; None if it is not all
        there. Raises Malformed.
        """
        data = self.data
        begin = start = self.pos
        if data.startswith(b"\r\n", start):  # one is allowed between requests (RFC 9112, 2.2)
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
        """A body of so many bytes, all of them there."""
        end = self.pos + length
        body = self.data[self.pos : end]
        if end < len(self.data):
            self.pos = end
        else:
            self.data = b""
            self.pos = 0
        return body

    def rest(self) -> bytes:
        """All that comes after the last head; it is not kept."""
        rest = self.data[self.pos :]
        self.data = b""
        self.pos = 0
        return rest

    def last_head(self) -> bytes:
        """The head that was cut last, as it came."""
        return self.data[self._start : self.pos]

    def clear(self) -> None:
        self.data = b""
        self.pos = 0

    def cut_authority(self, method: bytes, asked: bytes) -> bytes:
        """The path alone of the target in the last head, an absolute one (RFC 9112, 3.2.2).

        It stands there from now on, so that whoever the connection is handed to reads the same.
        Raises Malformed.
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
