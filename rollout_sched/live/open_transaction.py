"""Collects the changes that are written to the store next, over several turns of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollout_sched.store.changes import Transaction
from rollout_sched.store.errors import StoreBroken
from rollout_sched.store.store import Store
from rollout_sched.store.writer import StoreWriter

#: Seconds for which events are collected that need no durability promise, so that facts that change
#: with each event are written once.
GATHER_S = 0.02


class OpenTransaction:
    """The changes that have not gone to the writer's thread yet. Create it inside a running event
    loop.

    `complete` is called with the changes before they are written, to add what is written once for
    all events. `on_broken` is called once, in the loop, when the store can no longer be written.
    """

    def __init__(
        self,
        store: Store,
        complete: Callable[[Transaction], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self.changes = Transaction()
        self._complete = complete
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self.writer = StoreWriter(store, self._broken)
        self._wait_s = 0.0 if store.durable == "event" else GATHER_S
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """Write the changes soon."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._wait_s, self._write)

    def durably(self) -> None:
        """Write the changes durably now, though no caller waits: the event will not be repeated."""
        self._write()
        self.writer.promise()

    def promise(self) -> Awaitable[None]:
        """Done when all changes so far are durable. Awaiting it may raise StoreBroken."""
        self._write()
        return asyncio.wrap_future(self.writer.promise(), loop=self._loop)

    async def close(self) -> None:
        """Write the rest, and close the store."""
        self._write()
        await self._loop.run_in_executor(None, self.writer.close)

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._complete(self.changes)
        if self.changes:
            self.writer.write(self.changes)
            self.changes = Transaction()

    def _broken(self, error: StoreBroken) -> None:
        """Called in the writer's thread."""
        self._loop.call_soon_threadsafe(self._on_broken, error)
