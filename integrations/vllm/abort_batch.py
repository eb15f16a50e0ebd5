"""Sends several aborts, as at the end of a step, to the instance in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollout_sched.integrations.vllm.throttle import Throttle
from rollout_sched.live.ports import InstanceGone


class AbortBatch:
    """Collects ids for one iteration of the event loop and until the throttle permits a call."""

    def __init__(self, throttle: Throttle, send: Callable[[list[str]], Awaitable[None]]) -> None:
        self._throttle = throttle
        self._send = send
        self._ids: list[str] = []
        self._next: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._closed = False

    async def add(self, engine_id: str) -> None:
        """Returns when the call with the id has been answered. Raises the error of that call, or
        InstanceGone if this is closed, or was meanwhile."""
        if self._closed:
            raise InstanceGone("its connections are closed")
        self._ids.append(engine_id)
        if self._next is None:
            self._next = asyncio.create_task(self._send_all())
            self._calls.add(self._next)
            self._next.add_done_callback(self._over)
        call = self._next
        await asyncio.wait({call})  # cancelling one caller does not stop the others
        if call.cancelled():
            raise InstanceGone("its connections were closed before it answered an abort")
        call.result()

    async def close(self) -> None:
        """Cancel the calls in flight; no more follow."""
        self._closed = True
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _send_all(self) -> None:
        await asyncio.sleep(0)
        await self._throttle.acquire()
        ids, self._ids, self._next = self._ids, [], None
        await self._send(ids)  # never empty: for vLLM an empty list means every request

    def _over(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # retrieved, as its callers may have been cancelled
