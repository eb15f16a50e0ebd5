"""Fronts and their host in one process, connected by wires with delays that a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from rollout_sched.link.connected_front import ConnectedFront
from rollout_sched.link.front import RemoteFront
from rollout_sched.link.host import Host
from rollout_sched.live.ports import InstanceClient
from rollout_sched.live.requests.payloads import PayloadFactory
from rollout_sched.live.settings import Settings

EPOCH = "run"


class Wire:
    """One direction. Frames arrive in order; `delays`: least seconds for each frame."""

    def __init__(self, delays: Iterator[float], receive: Callable[[bytes], None]) -> None:
        self._delays = delays
        self._receive = receive
        self._free = 0.0

    def send(self, frame: bytes) -> None:
        self.later(self._receive, frame)

    def later(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call it when everything that was sent before has arrived."""
        loop = asyncio.get_running_loop()
        self._free = max(self._free, loop.time() + next(self._delays))
        loop.call_at(self._free, call, *arguments)


class Shared:
    """The host's clients, which a front uses, too (`remote_link.Clients`)."""

    def __init__(self, instances: dict[str, InstanceClient]) -> None:
        self._instances = instances
        self.reached: list[tuple[str, str]] = []
        self.left: list[str] = []

    def client(self, instance: str) -> InstanceClient:
        return self._instances[instance]

    def reach(self, instance: str, key: str) -> None:
        self.reached.append((instance, key))

    def leave(self, instance: str) -> None:
        self.left.append(instance)

    def unverified(self, instance: str) -> asyncio.Event | None:
        return None


class Joined:
    """A front with its two wires. `die` ends it suddenly."""

    def __init__(
        self,
        host: Host,
        name: str,
        delays: Iterator[float],
        *,
        instances: dict[str, InstanceClient],
        make: Callable[[bytes], PayloadFactory],
        settings: Settings,
        run_id: str = "run",
    ) -> None:
        self.dead = False
        self.broken: list[Exception] = []
        self._host = host
        self.clients = Shared(instances)
        self._up = Wire(delays, self._heard)
        self._down = Wire(delays, self._told)
        self.remote = RemoteFront(
            name,
            EPOCH,
            run_id,
            send=self._up.send,
            clients=self.clients,
            make=make,
            settings=settings,
            on_broken=self.broken.append,
        )
        self.connected: ConnectedFront = host.connect(name, self._down.send)

    def _heard(self, frame: bytes) -> None:
        self.connected.receive(frame)

    def _told(self, frame: bytes) -> None:
        if not self.dead:
            self.remote.receive(frame)

    async def die(self) -> None:
        """End the front. Its host notices when everything that it sent has arrived."""
        if self.dead:
            return
        self.dead = True
        self._up.later(partial(self._host.disconnect, self.connected))
        await self.remote.close()
