"""The idle connections of a pool, which are reused."""

from __future__ import annotations

import asyncio

from rollout_sched.integrations.http.client_connection import ClientConnection
from rollout_sched.integrations.http.exchange import Exchange


class IdleConnections:
    """The idle connections of a pool; each is closed after `keepalive_s` seconds."""

    __slots__ = ("_idle", "_keepalive_s", "_loop", "_timer")

    def __init__(self, keepalive_s: float) -> None:
        # The time since which each is idle, the longest first.
        self._idle: dict[ClientConnection, float] = {}
        self._keepalive_s = keepalive_s
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop  # set with the first connection

    def __len__(self) -> int:
        return len(self._idle)

    def keep(self, connection: ClientConnection) -> None:
        if self._timer is None:
            self._loop = asyncio.get_running_loop()
            self._timer = self._loop.call_later(self._keepalive_s, self._close_old)
        connection.reused = True
        self._idle[connection] = self._loop.time()

    def carry(self, exchange: Exchange) -> bool:
        """Send an exchange on an idle connection. False if there is none."""
        while self._idle:
            connection, since = self._idle.popitem()  # the most recent, so that others can expire
            now = self._loop.time()
            if now - since >= self._keepalive_s:
                connection.drop()
            elif connection.usable():
                exchange.sent_at = now
                connection.carry(exchange)
                return True
            # Otherwise it is about to read data that closes it.
        return False

    def forget(self, connection: ClientConnection) -> None:
        self._idle.pop(connection, None)

    def close(self) -> None:
        """Stop the timer; the pool closes the connections."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_old(self) -> None:
        """Close connections that were idle too long, and set the timer for the next one."""
        now = self._loop.time()
        self._timer = None
        while self._idle:
            oldest = next(iter(self._idle))
            left = self._idle[oldest] + self._keepalive_s - now
            if left > 0:
                self._timer = self._loop.call_later(left, self._close_old)
                return
            del self._idle[oldest]
            oldest.drop()
