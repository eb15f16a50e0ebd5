"""A front's own connections to the instances, made when it is first sent there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rollout_sched.integrations.vllm.http_instance import HttpInstance
from rollout_sched.live.ports import InstanceError, OnTokens, Order, Output

log = logging.getLogger(__name__)

#: Seconds until an instance that could not be looked at is looked at again; at first, and at most.
_AGAIN_S = (0.5, 30.0)


class FrontInstance(HttpInstance):
    """Whether it may serve is its scheduler's to say; what it offers is found out here, too."""

    unknown = "nobody has asked it yet what it offers"

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
        if self.unknown:
            raise InstanceError(f"{self.name}, as this front sees it: {self.unknown}")
        return await super().generate(order, on_tokens)


class FrontClients:
    """By name, which is a URL (`link.remote_link.Clients`). Make it inside a running event loop."""

    def __init__(self, make: Callable[[str], FrontInstance]) -> None:
        self._make = make
        self._clients: dict[str, FrontInstance] = {}
        self._looked: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def client(self, instance: str) -> FrontInstance:
        """Raises CallerError for a name that is no URL."""
        client = self._clients.get(instance)
        if client is None:
            client = self._clients[instance] = self._make(instance)
            looked = self._looked[instance] = asyncio.Event()
            looking = self._look_at(client, looked)
            self._tasks.append(asyncio.get_running_loop().create_task(looking))
        return client

    def unverified(self, instance: str) -> asyncio.Event | None:
        """Until it was looked at; what is sent to one that did not answer fails there."""
        looked = self._looked[instance]
        return None if looked.is_set() else looked

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.close()

    async def _look_at(self, client: FrontInstance, looked: asyncio.Event) -> None:
        wait_s, most_s = _AGAIN_S
        while True:
            try:
                await client.describe()
            except (InstanceError, OSError) as error:
                client.unknown = str(error)
                log.warning("instance %s: %s", client.name, client.unknown)
            else:
                client.unknown = ""
            looked.set()
            if not client.unknown:
                return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, most_s)
