"""An HTTP/1.1 server for the hot requests, which passes other requests to a fallback server.

Invariants: - requests of one connection are handled one at a time, in order; pipelined ones wait,
up to a limit; - a request is passed to the app, or the connection to the fallback, only with its
complete head, so that slow or endless heads cost the app nothing; - no byte of a body is kept for a
request that the app does not admit, and all bodies that are being read or processed share one
limit; - every state that waits for the client has a deadline; only the app's time is not limited; -
an exception of the app or the fallback ends only the request that it concerns.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import ssl as tls
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from rollout_sched.core.errors import CallerError, reason_of
from rollout_sched.integrations.http.bodies import BodyBudget
from rollout_sched.integrations.http.connections import Connections, ServerLimits
from rollout_sched.integrations.http.heads import Headers
from rollout_sched.integrations.http.request import ReceivedRequest
from rollout_sched.integrations.http.server_connection import ServerConnection

#: Status, headers and body of an answer that refuses a request.
Refusal = tuple[int, Headers, bytes]


class App(Protocol):
    def wants(self, method: bytes, target: bytes) -> bool:
        """Whether a request is for `handle`; the others go to the fallback."""

    def refusal(
        self, method: bytes, target: bytes, fields: Mapping[bytes, bytes]
    ) -> Refusal | None:
        """The answer that refuses a wanted request before its body is read; None admits it."""

    def handle(self, request: ReceivedRequest) -> None:
        """Answer a request, now or later."""


class HttpServer:
    """A protocol factory for `loop.create_server`.

    app       answers the requests that it wants
    fallback  makes the protocol for other connections, such as `aiohttp.web.AppRunner(...).server`,
              each for one request; its answers should close the connection, because a connection
              cannot come back. None: other requests are answered 404
    limits    limits of the connections. They also apply to connections of the fallback, which are
              closed without an answer if they break one: only the fallback knows what it has sent
    bodies    how much of `max_bodies` is in use
    turned_away  number of requests that the server refused, unread, by status
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
        """How many connections and bodies were refused because of a limit."""
        return self.connections.refused + self.bodies.refused

    async def listen(
        self,
        host: str,
        port: int,
        *,
        ssl: tls.SSLContext | None = None,
        backlog: int = 4096,
        reuse_port: bool = False,
    ) -> asyncio.Server:
        """Accept connections until `close`; port 0 picks a free one. `reuse_port`: other processes
        accept connections at it too."""
        loop = asyncio.get_running_loop()
        if host == "::" and socket.has_dualstack_ipv6():  # asyncio would leave out IPv4
            every = socket.create_server(
                (host, port),
                family=socket.AF_INET6,
                dualstack_ipv6=True,
                backlog=backlog,
                reuse_port=reuse_port,
            )
            listener = await loop.create_server(self, sock=every, ssl=ssl, backlog=backlog)
        else:
            listener = await loop.create_server(
                self, host, port, ssl=ssl, backlog=backlog, reuse_port=reuse_port
            )
        self._listeners.append(listener)
        return listener

    async def close(self, grace_s: float = 10.0) -> None:
        """Accept no new connections, let running requests finish for up to `grace_s` seconds, then
        close.

        The fallback closes the connections that it was given.
        """
        self.closing = True
        for listener in self._listeners:
            listener.close()
        await self.connections.end(grace_s)


# ------------------------------------------------------------------------------------------
# API keys as bearer tokens (RFC 6750): checks calls, and the form of keys.


def check_key(where: str, key: str) -> None:
    """Raises CallerError, with the place `where`, for a key that is not valid in a header."""
    if not key or not (key.isascii() and key.isprintable()) or " " in key:
        raise CallerError(f"{where}: an API key must be printable ASCII without spaces, not empty")


def authorization(key: str) -> bytes:
    """The value of the Authorization header for a key."""
    return b"Bearer " + key.encode()


class BearerKeys:
    """The keys that admit a call; if there are none, every call is admitted."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = [key.encode() for key in keys]

    @property
    def known(self) -> bool:
        """Whether a call needs a key."""
        return bool(self._keys)

    def admit(self, given: bytes | None) -> bool:
        """Whether the value of an Authorization header admits a call."""
        return not self._keys or self.number(given) > 0

    def number(self, given: bytes | None) -> int:
        """Which key the value of an Authorization header gives, from 1; 0 for none.

        The time it takes reveals nothing about the keys: every key is compared completely.
        """
        scheme, _, token = (given or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return 0
        found = 0
        for number, key in enumerate(self._keys, 1):
            found += number * hmac.compare_digest(token, key)
        return found


def read_keys(path: Path) -> list[str]:
    """The keys of a file, one per line; empty lines and lines that begin with # are ignored.

    Raises CallerError for a file without a key, or with a key that is not valid in a header.
    """
    keys = []
    for number, key in lines_of(path):
        check_key(f"{path}:{number}", key)
        keys.append(key)
    return keys


def lines_of(path: Path) -> list[tuple[int, str]]:
    """The lines that are not empty or comments, with their numbers. Raises CallerError if there
    are none."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CallerError(f"{path}: cannot be read: {reason_of(error)}") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1)]
    said = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    if not said:
        raise CallerError(f"{path}: the file has no key; write one key per line")
    return said
