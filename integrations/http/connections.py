"""The connections of a server: limits their number, and watches their deadlines."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

from rollout_sched.integrations.http.errors import report

#: Default limit for the bytes of a request's body.
MAX_BODY: Final = 64 * 2**20


@dataclass(kw_only=True)
class ServerLimits:
    """Limits for the connections of one server.

    max_body         bytes of a request's body; beyond this the answer is 413
    max_bodies       bytes of all bodies that are being read or processed; beyond this 503
    max_head         bytes of a request's head; beyond this 431
    max_unsent       bytes of an answer that a slow client has not read; beyond this it is cut off
    max_connections  connections at once; beyond this an idle one of the address with the most is
                     closed, or the new one is answered 503
    head_s           seconds from the first byte of a head to its last
    idle_s           seconds a connection may be idle between requests
    stall_s          seconds without progress while a body is read or an answer waits to be read
    body_rate        bytes per second at which a body must arrive after `stall_s`, else 408
    dead_s           seconds after which a client that no longer answers even on TCP counts as gone
                     (`Pool`); not below `stall_s`, because the system cannot tell it from a client
                     that does not read
    """

    max_body: int = MAX_BODY
    max_bodies: int = 4 * 2**30
    max_head: int = 32 * 1024
    max_unsent: int = 64 * 2**20
    max_connections: int = 16384
    head_s: float = 10.0
    idle_s: float = 75.0
    stall_s: float = 60.0
    body_rate: float = 16 * 1024
    dead_s: float = 60.0

    def __post_init__(self) -> None:
        self.max_body = min(self.max_body, self.max_bodies)


class Waiting(Protocol):
    """A connection that waits for its client until `deadline`, a loop time."""

    deadline: float

    def expire(self) -> None:
        """The deadline has passed."""


class ServedConnection(Waiting, Protocol):
    """A connection that this server closes. `idle`: it has no request."""

    @property
    def idle(self) -> bool: ...

    def retire(self) -> None:
        """Take no further request: close now, or after the current answer."""

    def drop(self) -> None:
        """Close at once."""


#: Connections of which one is closed to make room for another.
_CANDIDATES: Final = 16


class Connections:
    """All connections of one server.

    served   connections whose requests this server reads and answers, with their addresses
    handed   connections that the fallback answers
    refused  number of connections refused because of the limit
    now      loop time of the last sweep: exact enough for deadlines, and free
    """

    __slots__ = (
        "_by_address",
        "_crowd",
        "_crowd_of",
        "_emptied",
        "_limits",
        "_sweep_s",
        "_timer",
        "handed",
        "now",
        "refused",
        "served",
    )

    def __init__(self, limits: ServerLimits) -> None:
        self.served: dict[ServedConnection, str] = {}  # in order of arrival
        self._by_address: dict[str, dict[ServedConnection, None]] = {}
        self._crowd: dict[ServedConnection, None] = {}  # of the address with the most
        self._crowd_of = -1.0  # the time when that was found
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

    def join(self, connection: ServedConnection, address: str) -> bool:
        """Add a connection; False if the limit is reached and no connection is idle."""
        full = len(self.served) + len(self.handed) >= self._limits.max_connections
        if full and not self._make_room():
            self.refused += 1
            return False
        self.served[connection] = address
        self._by_address.setdefault(address, {})[connection] = None
        return True

    def _make_room(self) -> bool:
        """Close an idle connection of the address with the most: of some of them, the one that has
        been idle for longest. So a client that hoards connections, or a proxy, makes room itself.
        """
        if self._crowd_of != self.now or not self._crowd:
            self._crowd_of = self.now  # the search takes a millisecond
            self._crowd = max(self._by_address.values(), key=len, default={})
        some = list(islice(self._crowd, _CANDIDATES))
        idle = [one for one in some if one.idle]
        for busy in some:
            self._crowd[busy] = self._crowd.pop(busy)  # to the end: the next search sees others
        if not idle:
            return False
        longest = min(idle, key=lambda one: one.deadline)
        self.leave(longest)
        longest.retire()
        return True

    def leave(self, connection: ServedConnection) -> None:
        address = self.served.pop(connection, None)
        if address is not None:
            crowd = self._by_address[address]
            del crowd[connection]
            if not crowd:
                del self._by_address[address]
        if not self.served and self._emptied is not None:
            self._emptied.set()

    def transfer(self, connection: ServedConnection, handed: Waiting) -> None:
        """From now on the fallback answers this connection."""
        self.handed[handed] = None
        self.leave(connection)

    def replace(self, connection: ServedConnection, other: ServedConnection) -> None:
        """From now on `other` manages this connection."""
        address = self.served.get(connection)
        if address is not None:
            self.served[other] = address
            self._by_address[address][other] = None
            self.leave(connection)

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

    def extend_deadline(self, deadline: float, size: int) -> float:
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


class Backlog:
    """Unread data of one client, at most `most` bytes. `throttled`: it does not read for now."""

    __slots__ = ("_most", "_transport", "_unsent", "throttled")

    def __init__(self, transport: asyncio.Transport, limit: int) -> None:
        self._transport = transport
        self._most = limit
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


#: Seconds for which a client may continue to send before its connection is closed. If closed at
#: once, the kernel would answer further data with a reset, which can overtake our answer.
LINGER_S = 2.0


class Lingering:
    """A connection that has sent its last answer and is about to be closed. It drops further data
    until the client has had time to read its answer.

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

    def data_received(self, data: bytes) -> None:
        """Drops it."""

    def eof_received(self) -> bool | None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)

    def pause_writing(self) -> None:
        self._backlog.begin()
        self.deadline = self._connections.now + self._limits.stall_s

    def resume_writing(self) -> None:
        self._backlog.end()
        self.deadline = self._connections.now + LINGER_S

    @property
    def idle(self) -> bool:
        return False

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
