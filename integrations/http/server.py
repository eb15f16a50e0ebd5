"""An HTTP/1.1 server for the few requests that are hot, and a door to another one for the rest.

Invariants:
- requests of one connection are handled one at a time, in order; what is pipelined waits, bounded;
- a request is handed to the app, or the connection to the fallback, only with its whole head, so
  that slow or endless heads end here;
- no byte of a body is kept of a request that the app does not admit, and what is kept of all
  bodies, being read or being worked on, is within one bound;
- every state in which we wait for the client has a deadline; only the app may take its time;
- what the app or the fallback raises ends the request it was about, and nothing else.
"""

from __future__ import annotations

import asyncio
import ssl as tls
from collections.abc import Callable, Mapping
from typing import Protocol, cast

from rollout_sched.integrations.http.body_budget import BodyBudget
from rollout_sched.integrations.http.connections import Connections
from rollout_sched.integrations.http.heads import Headers
from rollout_sched.integrations.http.limits import ServerLimits
from rollout_sched.integrations.http.request import ReceivedRequest
from rollout_sched.integrations.http.server_connection import ServerConnection

#: Status, headers and body of an answer that turns a request away.
Refusal = tuple[int, Headers, bytes]


class App(Protocol):
    def wants(self, method: bytes, target: bytes) -> bool:
        """Whether a request is for `handle`; the others go to the fallback."""

    def refusal(
        self, method: bytes, target: bytes, fields: Mapping[bytes, bytes]
    ) -> Refusal | None:
        """What a request that `wants` would take is turned away with, before its body is read."""

    def handle(self, request: ReceivedRequest) -> None:
        """Answer a request, now or later."""


class HttpServer:
    """A protocol factory for `loop.create_server`.

    app       answers what it wants
    fallback  makes the protocol that the other connections are handed to, such as
              `aiohttp.web.AppRunner(...).server`, each for one request; what it answers should
              close the connection, for there is no way back. None: they are answered 404
    limits    what its connections keep. What the fallback is handed keeps the same, but is cut off
              where it breaks them: only the fallback knows what it has answered
    bodies    what of `max_bodies` is in use
    turned_away  how many requests were answered here, unread, by status
    """

    def __init__(
        self,
        app: App,
        fallback: Callable[[], asyncio.Protocol] | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self.app = app
        self.fallback = fallback
        self.limits = limits or ServerLimits()
        self.bodies = BodyBudget(self.limits.max_bodies)
        self.connections = Connections(self.limits)
        self.turned_away: dict[int, int] = {}
        self.closing = False
        self._listeners: list[asyncio.AbstractServer] = []

    def __call__(self) -> asyncio.Protocol:
        self.connections.start()
        return cast(asyncio.Protocol, ServerConnection(self))

    @property
    def refused(self) -> int:
        """How many connections and bodies were turned away for want of room."""
        return self.connections.refused + self.bodies.refused

    async def listen(
        self, host: str, port: int, *, ssl: tls.SSLContext | None = None, backlog: int = 4096
    ) -> asyncio.Server:
        """Accept connections until `close`; port 0 picks a free one."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(self, host, port, ssl=ssl, backlog=backlog)
        self._listeners.append(listener)
        return listener

    async def close(self, grace_s: float = 10.0) -> None:
        """Accept no more, let what runs finish for up to `grace_s` seconds, then close.

        Connections that were handed to the fallback are the fallback's to close.
        """
        self.closing = True
        for listener in self._listeners:
            listener.close()
        await self.connections.end(grace_s)
