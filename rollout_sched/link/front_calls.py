"""A front's requests, across the successive schedulers that it is connected to."""

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
    """No scheduler has connected yet."""


class FrontCalls:
    """Accepts clients' requests as a driver does, and keeps them across losses of the scheduler: a
    new scheduler gets all requests with the tokens made so far. Without a scheduler, running
    attempts continue and new requests wait. Create it inside a running event loop.

    name       unique over all fronts and their starts
    on_broken  called with the error when it cannot carry out an order: reconnect it
    """

    def __init__(self, name: str, clients: Clients, on_broken: Callable[[Exception], None]) -> None:
        self.connected = False
        self.connections = 0
        self._refused = 0  # by the fronts of earlier schedulers
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
        """Whether a scheduler has ever connected."""
        return self._remote is not None

    @property
    def refused(self) -> int:
        """Number of refused frames of orders."""
        return self._refused + (0 if self._remote is None else self._remote.refused)

    # -- its clients -----------------------------------------------------------------------

    def max_model_len(self) -> int:
        """Like `Driver.max_model_len`; 0 without a scheduler."""
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
        """Like `Driver.submit`. Raises NoScheduler before the first scheduler has connected."""
        remote = self._remote
        if remote is None:
            raise NoScheduler("no scheduler has connected yet")
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
        """A scheduler has connected; `send` takes the frames for it. Raises msgspec.DecodeError."""
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
            remote.max_model_len = before.max_model_len  # until the new scheduler reports it
            self._refused += before.refused
            self._spawn(before.leave(self._take_over))

    def receive(self, frame: bytes) -> None:
        """Handle a frame of the connected scheduler. Raises msgspec.DecodeError."""
        if self._remote is not None:
            self._remote.receive(frame)

    def disconnected(self) -> None:
        """The scheduler is gone, or cannot be reached."""
        self.connected = False
        if self._remote is not None:
            self._remote.lose_scheduler()

    async def close(self) -> None:
        """Stop everything without reporting it."""
        self.disconnected()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._remote is not None:
            await self._remote.close()

    def _take_over(self, call: ClientCall) -> None:
        assert self._remote is not None  # the new one
        self._calls[call.name] = self._remote, call
        self._remote.calls.take_over(call)

    def _over(self, call: ClientCall) -> None:
        del self._calls[call.name]

    def _spawn(self, leaving: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(leaving)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
