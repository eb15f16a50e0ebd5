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
    """By name, which is a URL (`link.remote_link.Clients`). Make it inside a running event loop.

    `make(url, key)` makes one; with the key "" it is for the front's own settings which to send.
    """

    def __init__(self, make: Callable[[str, str], FrontInstance]) -> None:
        self._make = make
        self._clients: dict[str, FrontInstance] = {}
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._looked: dict[str, asyncio.Event] = {}
        self._replaced: list[FrontInstance] = []  # what was sent over them may still be answered

    def client(self, instance: str) -> FrontInstance:
        """Raises CallerError for a name that is no URL."""
        if instance not in self._clients:
            self.reach(instance, "")
        return self._clients[instance]

    def reach(self, instance: str, key: str) -> None:
        """It has joined, perhaps as another than it was: it is looked at before anything more is
        sent there. Raises CallerError for a name that is no URL."""
        before = self._clients.get(instance)
        if before is None or (key and key != before.api_key):
            self._clients[instance] = self._make(instance, key)
            if before is not None:
                self._replaced.append(before)
        look = self._looks.get(instance)
        if look is not None:
            look.cancel()
        looked = self._looked.get(instance)
        if looked is None or looked.is_set():  # else somebody may wait for the first look
            looked = self._looked[instance] = asyncio.Event()
        looking = self._look_at(self._clients[instance], looked)
        self._looks[instance] = asyncio.get_running_loop().create_task(looking)

    def unverified(self, instance: str) -> asyncio.Event | None:
        """Until it was looked at; what is sent to one that did not answer fails there."""
        looked = self._looked[instance]
        return None if looked.is_set() else looked

    async def close(self) -> None:
        for look in self._looks.values():
            look.cancel()
        await asyncio.gather(*self._looks.values(), return_exceptions=True)
        for client in (*self._replaced, *self._clients.values()):
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
