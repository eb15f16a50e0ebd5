"""Reads the head of an answer, and skips interim answers (1xx) before it."""

from __future__ import annotations

from typing import Final

from rollout_sched.integrations.http.errors import Malformed
from rollout_sched.integrations.http.heads import END, UNTIL_CLOSE, Head, read_response

#: Longest head of an answer, in bytes, with the empty line that ends it.
MAX_HEAD: Final = 64 * 1024

#: Most interim answers (1xx) before the answer itself.
MAX_INTERIM: Final = 16


class AnswerHeads:
    """The heads of the answers on one connection, one after the other.

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
