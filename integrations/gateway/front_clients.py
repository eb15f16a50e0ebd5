"""A front's own connections to the instances, opened when the front first needs them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rollout_sched.integrations.vllm.http_instance import HttpInstance
from rollout_sched.live.ports import InstanceError, OnTokens, Order, Output

log = logging.getLogger(__name__)

#: Seconds until an instance that did not describe itself is asked again: first wait, longest wait.
_AGAIN_S = (0.5, 30.0)


class FrontInstance(HttpInstance):
    """The scheduler decides whether the instance may serve; the front also asks what it offers."""

    unknown = "this front has not asked it yet what it offers"

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
        if self.unknown:
            raise InstanceError(f"{self.name}, as seen by this front: {self.unknown}")
        return await super().generate(order, on_tokens)


class _Reached:
    """An instance, with the connections to it.

    holders   calls of `reach` minus calls of `leave`
    looked    set when the instance was asked for its description, whether it answered or not
    replaced  clients with an earlier key: requests sent over them may still be answered
    """

    def __init__(self, client: FrontInstance) -> None:
        self.client = client
        self.holders = 0
        self.looked = asyncio.Event()
        self.replaced: list[FrontInstance] = []
        self._look: asyncio.Task[None] | None = None

    def replace(self, client: FrontInstance) -> None:
        self.replaced.append(self.client)
        self.client = client

    def look(self) -> None:
        """Ask the instance for its description again, before more requests are sent to it."""
        if self._look is not None:
            self._look.cancel()
        if self.looked.is_set():  # otherwise a request may wait for the first description
            self.looked = asyncio.Event()
        self._look = asyncio.get_running_loop().create_task(_look_at(self.client, self.looked))

    async def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
            await asyncio.gather(self._look, return_exceptions=True)
        self.looked.set()  # attempts that still wait then fail at the closed client
        for client in (*self.replaced, self.client):
            await client.close()


class FrontClients:
    """Clients by instance name, which is a URL (`link.remote_link.Clients`). Create it inside a
    running event loop.

    `make(url, key)` makes a client; with the key "" the front's own settings decide which key to
    send.
    """

    def __init__(self, make: Callable[[str, str], FrontInstance]) -> None:
        self._make = make
        self._here: dict[str, _Reached] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._here)

    def client(self, instance: str) -> FrontInstance:
        """Raises CallerError for a name that is not a URL."""
        if instance not in self._here:
            self._look_at(instance, "")
        return self._here[instance].client

    def reach(self, instance: str, key: str) -> None:
        """The instance has joined, perhaps as a different server than before: it is asked for its
        description before more requests are sent to it. Raises CallerError for a name that is not a
        URL."""
        self._look_at(instance, key)
        self._here[instance].holders += 1

    def leave(self, instance: str) -> None:
        """Call it once for each `reach`; the last call closes the connections to the instance."""
        reached = self._here.get(instance)
        if reached is None:
            return
        reached.holders -= 1
        if reached.holders <= 0:
            del self._here[instance]
            closing = asyncio.get_running_loop().create_task(reached.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def unverified(self, instance: str) -> asyncio.Event | None:
        """An event to wait for before sending, or None. It is set when the instance was asked for
        its description; if that failed, requests to it fail in `generate`."""
        looked = self._here[instance].looked
        return None if looked.is_set() else looked

    async def close(self) -> None:
        here, self._here = self._here, {}
        await asyncio.gather(*self._closing, *(reached.close() for reached in here.values()))

    def _look_at(self, instance: str, key: str) -> None:
        reached = self._here.get(instance)
        if reached is None:
            reached = self._here[instance] = _Reached(self._make(instance, key))
        elif key and key != reached.client.api_key:
            reached.replace(self._make(instance, key))
        reached.look()


async def _look_at(client: FrontInstance, looked: asyncio.Event) -> None:
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
