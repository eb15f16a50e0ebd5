"""Opens new connections, each for the exchange that it carries first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from rollout_sched.integrations.http.client_connection import ClientConnection, ConnectionOwner
from rollout_sched.integrations.http.errors import NotConnected
from rollout_sched.integrations.http.exchange import Exchange
from rollout_sched.integrations.http.origin import Origin


class Dialler:
    """Connections to an origin that are being opened, for up to `connect_s` seconds.

    Opened connections join `owner`. `on_done` is called whenever an attempt succeeds or fails.
    """

    __slots__ = ("_connect_s", "_dialling", "_on_done", "_origin", "_owner")

    def __init__(
        self, owner: ConnectionOwner, origin: Origin, connect_s: float, on_done: Callable[[], None]
    ) -> None:
        self._owner = owner
        self._origin = origin
        self._connect_s = connect_s
        self._on_done = on_done
        self._dialling: dict[asyncio.Task[None], Exchange] = {}

    def __len__(self) -> int:
        return len(self._dialling)

    def dial(self, exchange: Exchange) -> None:
        """Carry an exchange on a new connection."""
        task = asyncio.get_running_loop().create_task(self._dial(exchange))
        self._dialling[task] = exchange
        task.add_done_callback(self._dialled)

    def refuse(self, exchange: Exchange, text: str) -> None:
        """End an exchange that no connection carries with an error."""
        if not exchange.done and exchange.connection is None:
            exchange.fail(NotConnected(f"{self._origin.url}: {text}"))

    def close(self, text: str) -> None:
        """Cancel all openings; `text` says why."""
        for task in self._dialling:
            task.cancel()
        for exchange in list(self._dialling.values()):
            self.refuse(exchange, text)

    async def _dial(self, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        connection = ClientConnection(self._owner, exchange)
        made = False
        try:
            async with asyncio.timeout(self._connect_s):
                await loop.create_connection(
                    lambda: cast(asyncio.Protocol, connection),
                    self._origin.host,
                    self._origin.port,
                    ssl=self._origin.ssl,
                )
            made = True
        except TimeoutError:
            self.refuse(exchange, f"no connection within {self._connect_s:g} s")
        except Exception as error:  # the exchange must end, whatever a resolver or TLS raises
            self.refuse(exchange, f"no connection: {error}")
        finally:
            if not made:  # uvloop does not report the loss of a connection that was just opened
                connection.connection_lost(ConnectionAbortedError("while it was opened"))

    def _dialled(self, task: asyncio.Task[None]) -> None:
        del self._dialling[task]
        self._on_done()
