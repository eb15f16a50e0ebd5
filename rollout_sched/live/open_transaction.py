"""What is written to a store next, put together over some turns of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollout_sched.store.changes import Transaction
from rollout_sched.store.errors import StoreBroken
from rollout_sched.store.store import Store
from rollout_sched.store.writer import StoreWriter

#: Seconds for which events are gathered that nobody is promised: facts that change with each of
#: them are put together once.
GATHER_S = 0.02


class OpenTransaction:
    """Changes, until they go to the writer's thread, and then those after them. Make it inside a
    running event loop.

    `complete` is called with them at last, for what is put together once for all events.
    `on_broken` is called in the loop, once, when nothing can be written any more.
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
        """Something has happened: have it written soon."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._wait_s, self._write)

    def durably(self) -> None:
        """Something has happened of which we shall not hear again: have it written durably, though
        nobody waits."""
        self._write()
        self.writer.promise()

    def promise(self) -> Awaitable[None]:
        """Done when all that has happened is durable. Raises StoreBroken there."""
        self._write()
        return asyncio.wrap_future(self.writer.promise(), loop=self._loop)

    async def close(self) -> None:
        """Write what is left, and close the store."""
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
