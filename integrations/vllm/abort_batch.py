"""Several aborts at once, as at the end of a step, go to the instance as one call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollout_sched.integrations.vllm.throttle import Throttle


class AbortBatch:
    """Collects ids until the event loop has gone round and the throttle lets a call through."""

    def __init__(self, throttle: Throttle, send: Callable[[list[str]], Awaitable[None]]) -> None:
        self._throttle = throttle
        self._send = send
        self._ids: list[str] = []
        self._flush: asyncio.Task[None] | None = None

    async def add(self, engine_id: str) -> None:
        """Returns when the call that carries the id has been answered; raises what it raised."""
        self._ids.append(engine_id)
        if self._flush is None:
            self._flush = asyncio.create_task(self._send_all())
            self._flush.add_done_callback(_look)  # whoever waits for it may be cancelled
        await asyncio.shield(self._flush)

    async def _send_all(self) -> None:
        await asyncio.sleep(0)
        await self._throttle.acquire()
        ids, self._ids, self._flush = self._ids, [], None
        await self._send(ids)  # never empty: to vLLM an empty list means every request


def _look(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
