"""The data sent to a client that it has not read yet."""

from __future__ import annotations

import asyncio


class Backlog:
    """Unread data of one client, at most `most` bytes. `throttled`: it does not read for now."""

    __slots__ = ("_most", "_transport", "_unsent", "throttled")

    def __init__(self, transport: asyncio.Transport, most: int) -> None:
        self._transport = transport
        self._most = most
        self._unsent = 0  # unread bytes at the last check
        self.throttled = False

    def begin(self) -> None:
        self.throttled = True
        self._unsent = self._transport.get_write_buffer_size()

    def end(self) -> None:
        self.throttled = False

    def cut(self) -> None:
        """Close the connection if too much is unread."""
        if self._transport.get_write_buffer_size() > self._most:
            self._transport.abort()

    def shrinks(self) -> bool:
        """Whether the throttled client is slow but not stuck: it has read since the last check."""
        before = self._unsent
        self._unsent = self._transport.get_write_buffer_size()
        return self.throttled and self._unsent < before
