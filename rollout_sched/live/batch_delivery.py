"""Batches on their way to the trainer: each is handed out again until it is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollout_sched.live.samples import Batch


class NotYet(Exception):
    """No batch was complete in time; ask again."""


class BatchDelivery:
    """One batch at a time: it is requested, delivered and acknowledged, and then the next one is.

    Whoever asks meanwhile, in vain or at once with another, waits for the same one, so a connection
    or a wait that breaks off loses nothing. `request` is called to ask for a batch; what comes of
    it is told by `deliver` or `fail`, then or later.
    """

    def __init__(self, request: Callable[[], None]) -> None:
        self._request = request
        self._batch: asyncio.Future[Batch | None] | None = None  # None: the next is to be requested
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def awaited(self) -> bool:
        """Whether a batch was requested and has not come."""
        return self._batch is not None and not self._batch.done()

    async def next(self, acknowledged: int | None, timeout_s: float | None) -> Batch | None:
        """The batch after `acknowledged`, its number; None when nothing is left.

        Without the number of the batch handed out last, that one comes again. Raises NotYet after
        `timeout_s` seconds; the batch then waits for the next call.
        """
        if acknowledged is not None:
            self._acknowledge(acknowledged)
        batch = self._requested()
        either: set[asyncio.Future[Any]] = {batch, self._closed}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._closed.done() or not batch.done():
            raise NotYet
        return batch.result()

    def deliver(self, batch: Batch | None) -> None:
        """To whoever asks, until it is acknowledged; None, nothing is left, for ever."""
        assert self._batch is not None  # it was requested
        self._batch.set_result(batch)

    def fail(self, error: Exception) -> None:
        """There will be no batch; a request for another will fail too."""
        assert self._batch is not None
        self._batch.set_exception(error)
        self._batch.exception()  # it may be that nobody ever asks for it

    def close(self) -> None:
        """Send away who waits."""
        if not self._closed.done():
            self._closed.set_result(None)

    def _requested(self) -> asyncio.Future[Batch | None]:
        if self._batch is None:
            self._batch = asyncio.get_running_loop().create_future()
            try:
                self._request()
            except BaseException:
                self._batch = None
                raise
        return self._batch

    def _acknowledge(self, number: int) -> None:
        """An acknowledgement that comes twice does not count for the batch after."""
        handed_out = self._batch
        if handed_out is None or not handed_out.done() or handed_out.exception() is not None:
            return
        batch = handed_out.result()
        if batch is not None and batch.number == number:
            self._batch = None
