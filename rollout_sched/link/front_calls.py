"""A front's requests across the schedulers that it is connected to, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rollout_sched.core.errors import RolloutError
from rollout_sched.link.client_call import ClientCall
from rollout_sched.link.recipe import Recipes, read_welcome
from rollout_sched.link.remote_front import RemoteFront
from rollout_sched.link.remote_link import Clients
from rollout_sched.live.ports import Payload


class NoScheduler(RolloutError, RuntimeError):
    """None has been here yet."""


class FrontCalls:
    """Takes clients' requests as a driver does, and sees them through whatever becomes of its
    schedulers: one that comes is told of all that is here, with what was made of it. While there is
    none, what runs goes on and what comes waits. Make it inside a running event loop.

    name       unique over all fronts and their starts
    on_broken  called with why, when it cannot do what it is told: it is to be connected again
    """

    def __init__(self, name: str, clients: Clients, on_broken: Callable[[Exception], None]) -> None:
        self.connected = False
        self.connections = 0
        self._refused = 0  # by fronts of schedulers that have gone
        self._name = name
        self._clients = clients
        self._on_broken = on_broken
        self._remote: RemoteFront | None = None
        self._calls: dict[str, tuple[RemoteFront, ClientCall]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def known(self) -> bool:
        """Whether a scheduler has been here."""
        return self._remote is not None

    @property
    def refused(self) -> int:
        """Orders of other epochs."""
        return self._refused + (0 if self._remote is None else self._remote.refused)

    # -- its clients -----------------------------------------------------------------------

    def max_model_len(self) -> int:
        """As `Driver.max_model_len`; 0 without a scheduler."""
        return 0 if self._remote is None else self._remote.max_model_len

    def submit(
        self,
        payload: Payload,
        prompt_tokens: int,
        max_tokens: int,
        group: str = "",
        session: str = "",
        priority: int = 0,
    ) -> str:
        """As `Driver.submit`. Raises NoScheduler before the first one is here."""
        remote = self._remote
        if remote is None:
            raise NoScheduler("no scheduler is here yet")
        name = remote.calls.submit(payload, prompt_tokens, max_tokens, group, session, priority)
        self._calls[name] = remote, remote.calls[name]
        return name

    def withdraw(self, request: str) -> None:
        """The client of a submitted request has gone."""
        held = self._calls.get(request)
        if held is not None:
            remote, call = held
            remote.calls.withdraw(call.submitted.request)

    # -- its schedulers --------------------------------------------------------------------

    def connect(self, welcome: bytes, send: Callable[[bytes], None]) -> None:
        """A scheduler is here; `send` takes the frames for it. Raises msgspec.DecodeError."""
        told = read_welcome(welcome)
        self.connections += 1
        before = self._remote
        remote = self._remote = RemoteFront(
            f"{self._name}.{self.connections}",
            told.epoch,
            told.epoch,
            send=send,
            clients=self._clients,
            make=Recipes(told).factory,
            settings=told.settings,
            on_broken=self._on_broken,
            on_over=self._over,
        )
        self.connected = True
        if before is not None:
            remote.max_model_len = before.max_model_len  # until it is told
            self._refused += before.refused
            self._spawn(before.leave(self._take_over))

    def receive(self, frame: bytes) -> None:
        """A frame of the scheduler that is here. Raises msgspec.DecodeError."""
        if self._remote is not None:
            self._remote.receive(frame)

    def disconnected(self) -> None:
        """It is gone, or cannot be reached."""
        self.connected = False
        if self._remote is not None:
            self._remote.lose_scheduler()

    async def close(self) -> None:
        """Nobody is told."""
        self.disconnected()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._remote is not None:
            await self._remote.close()

    def _take_over(self, call: ClientCall) -> None:
        assert self._remote is not None  # the one that has come
        self._calls[call.name] = self._remote, call
        self._remote.calls.take_over(call)

    def _over(self, call: ClientCall) -> None:
        del self._calls[call.name]

    def _spawn(self, leaving: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(leaving)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
