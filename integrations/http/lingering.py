"""A connection that has sent its last answer and is about to be closed."""

from __future__ import annotations

import asyncio
import contextlib

from rollout_sched.integrations.http.backlog import Backlog
from rollout_sched.integrations.http.connections import Connections
from rollout_sched.integrations.http.limits import ServerLimits

#: Seconds for which a client may continue to send before its connection is closed. If closed at
#: once, the kernel would answer further data with a reset, which can overtake our answer.
LINGER_S = 2.0


class Lingering(asyncio.Protocol):
    """Drops further data, until the client has had time to read its answer.

    `deadline` is the loop time until which the server waits for the client.
    """

    def __init__(
        self,
        connections: Connections,
        limits: ServerLimits,
        transport: asyncio.Transport,
        backlog: Backlog,
    ) -> None:
        self._connections = connections
        self._limits = limits
        self._transport = transport
        self._backlog = backlog
        self.deadline = connections.now + LINGER_S

    def begin(self) -> None:
        """Send EOF, if the transport can."""
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has closed it first
                self._transport.write_eof()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)

    def pause_writing(self) -> None:
        self._backlog.begin()
        self.deadline = self._connections.now + self._limits.stall_s

    def resume_writing(self) -> None:
        self._backlog.end()
        self.deadline = self._connections.now + LINGER_S

    def retire(self) -> None:
        """Does nothing: it is about to close anyway."""

    def expire(self) -> None:
        """The deadline has passed."""
        if self._backlog.shrinks():
            self.deadline = self._connections.now + self._limits.stall_s
        else:
            self.drop()

    def drop(self) -> None:
        self._transport.abort()
