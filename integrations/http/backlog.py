"""Whether a client reads what it is sent."""

from __future__ import annotations

import asyncio


class Backlog:
    """What a client has yet to read of its answers. `throttled`: too much for now."""

    __slots__ = ("_transport", "_unsent", "throttled")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._unsent = 0  # bytes it had to read when we last looked
        self.throttled = False

    def begin(self) -> None:
        """The client does not read for now."""
        self.throttled = True
        self._unsent = self._transport.get_write_buffer_size()

    def end(self) -> None:
        self.throttled = False

    def shrinks(self) -> bool:
        """Whether the client, throttled, is slow but not stuck: has read since we last looked."""
        before = self._unsent
        self._unsent = self._transport.get_write_buffer_size()
        return self.throttled and self._unsent < before
