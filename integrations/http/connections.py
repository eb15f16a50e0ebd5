"""The connections of a server: limits their number, and watches their deadlines."""

from __future__ import annotations

import asyncio
from typing import Protocol

from rollout_sched.integrations.http.errors import report
from rollout_sched.integrations.http.limits import ServerLimits


class Waiting(Protocol):
    """A connection that waits for its client until `deadline`, a loop time."""

    deadline: float

    def expire(self) -> None:
        """The deadline has passed."""


class ServedConnection(Waiting, Protocol):
    """A connection that this server closes."""

    def retire(self) -> None:
        """Take no further request: close now, or after the current answer."""

    def drop(self) -> None:
        """Close at once."""


class Connections:
    """All connections of one server.

    served   connections whose requests this server reads and answers
    handed   connections that the fallback answers
    refused  number of connections refused because of the limit
    now      loop time of the last sweep: exact enough for deadlines, and free
    """

    __slots__ = ("_emptied", "_limits", "_sweep_s", "_timer", "handed", "now", "refused", "served")

    def __init__(self, limits: ServerLimits) -> None:
        self.served: dict[ServedConnection, None] = {}  # in order of arrival
        self.handed: dict[Waiting, None] = {}
        self.refused = 0
        self.now = 0.0
        self._limits = limits
        self._sweep_s = min(1.0, min(limits.head_s, limits.idle_s, limits.stall_s) / 4)
        self._timer: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Event | None = None

    def start(self) -> None:
        """Watch deadlines until `stop`."""
        if self._timer is None:
            self._sweep()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def join(self, connection: ServedConnection) -> bool:
        """Add a connection; False if the limit is reached."""
        if len(self.served) + len(self.handed) >= self._limits.max_connections:
            self.refused += 1
            return False
        self.served[connection] = None
        return True

    def leave(self, connection: ServedConnection) -> None:
        self.served.pop(connection, None)
        if not self.served and self._emptied is not None:
            self._emptied.set()

    def hand_over(self, connection: ServedConnection, handed: Waiting) -> None:
        """From now on the fallback answers this connection."""
        self.handed[handed] = None
        self.leave(connection)

    def replace(self, connection: ServedConnection, other: ServedConnection) -> None:
        """From now on `other` manages this connection."""
        if connection in self.served:
            self.served[other] = None
            self.served.pop(connection, None)

    async def end(self, grace_s: float) -> None:
        """Let current answers finish for up to `grace_s` seconds, then drop the rest."""
        for connection in list(self.served):
            connection.retire()
        self._emptied = asyncio.Event()
        try:
            if self.served:
                async with asyncio.timeout(grace_s):
                    await self._emptied.wait()
        except TimeoutError:
            for connection in list(self.served):
                connection.drop()
        self.stop()

    def put_off(self, deadline: float, size: int) -> float:
        """The new deadline of a body after `size` more bytes have arrived."""
        limits = self._limits
        return min(self.now + limits.stall_s, deadline + size / limits.body_rate)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        self._timer = loop.call_later(self._sweep_s, self._sweep)
        everyone: list[Waiting] = [*self.served, *self.handed]
        late = [one for one in everyone if one.deadline < self.now]
        for connection in late:
            try:
                connection.expire()
            except Exception as error:  # the other connections must expire too
                report("ending a connection that has waited too long", error)
