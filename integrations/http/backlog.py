"""What a client has yet to read of what it was sent."""

from __future__ import annotations

import asyncio


class Backlog:
    """Of one client, at most `most` bytes. `throttled`: it does not read for now."""

    __slots__ = ("_most", "_transport", "_unsent", "throttled")

    def __init__(self, transport: asyncio.Transport, most: int) -> None:
        self._transport = transport
        self._most = most
        self._unsent = 0  # bytes it had to read when we last looked
        self.throttled = False

    def begin(self) -> None:
        self.throttled = True
        self._unsent = self._transport.get_write_buffer_size()

    def end(self) -> None:
        self.throttled = False

    def cut(self) -> None:
        """Close the connection if too much waits."""
        if self._transport.get_write_buffer_size() > self._most:
            self._transport.abort()

    def shrinks(self) -> bool:
        """Whether the client, throttled, is slow but not stuck: has read since we last looked."""
        before = self._unsent
        self._unsent = self._transport.get_write_buffer_size()
        return self.throttled and self._unsent < before
