"""The limits of a server: sizes, counts and times."""

from __future__ import annotations

from typing import Final

#: Default limit for the bytes of a request's body.
MAX_BODY: Final = 64 * 2**20


class ServerLimits:
    """Limits for the connections of one server.

    max_body         bytes of a request's body; beyond this the answer is 413
    max_bodies       bytes of all bodies that are being read or processed; beyond this 503
    max_head         bytes of a request's head; beyond this 431
    max_unsent       bytes of an answer that a slow client has not read; beyond this it is cut off
    max_connections  connections at once; beyond this 503
    head_s           seconds from the first byte of a head to its last
    idle_s           seconds a connection may be idle between requests
    stall_s          seconds without progress while a body is read or an answer waits to be read
    body_rate        bytes per second at which a body must arrive after `stall_s`, else 408
    dead_s           seconds after which a client that no longer answers even on TCP counts as gone
                     (`Pool`); not below `stall_s`, because the system cannot tell it from a client
                     that does not read
    """

    __slots__ = (
        "body_rate",
        "dead_s",
        "head_s",
        "idle_s",
        "max_bodies",
        "max_body",
        "max_connections",
        "max_head",
        "max_unsent",
        "stall_s",
    )

    def __init__(
        self,
        *,
        max_body: int = MAX_BODY,
        max_bodies: int = 4 * 2**30,
        max_head: int = 32 * 1024,
        max_unsent: int = 64 * 2**20,
        max_connections: int = 16384,
        head_s: float = 10.0,
        idle_s: float = 75.0,
        stall_s: float = 60.0,
        body_rate: float = 16 * 1024,
        dead_s: float = 60.0,
    ) -> None:
        self.max_body = min(max_body, max_bodies)
        self.max_bodies = max_bodies
        self.max_head = max_head
        self.max_unsent = max_unsent
        self.max_connections = max_connections
        self.head_s = head_s
        self.idle_s = idle_s
        self.stall_s = stall_s
        self.body_rate = body_rate
        self.dead_s = dead_s
