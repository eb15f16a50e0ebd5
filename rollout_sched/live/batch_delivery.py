"""Batches over a connection that may break: each is handed out again until it is acknowledged."""

from __future__ import annotations

import asyncio

from rollout_sched.live.samples import Batch
from rollout_sched.live.trainer_session import TrainerSession


class NotYet(Exception):
    """No batch was complete in time; ask again."""


class BatchDelivery:
    """One trainer's way to its batches. Asking twice at once gives both the same batch."""

    def __init__(self, trainer: TrainerSession) -> None:
        self._trainer = trainer
        self._asking: asyncio.Task[Batch | None] | None = None
        self._closed = asyncio.Event()

    async def next(self, acknowledged: int | None, timeout_s: float) -> Batch | None:
        """The batch after `acknowledged`, its number; None when nothing is left.

        Without the number of the batch handed out last, that one comes again. Raises NotYet after
        `timeout_s` seconds; the batch then waits for the next call.
        """
        if acknowledged is not None:
            self._acknowledge(acknowledged)
        asking = self._asking
        if asking is None:
            asking = self._asking = asyncio.create_task(self._trainer.next_batch())
        closed = asyncio.create_task(self._closed.wait())
        try:
            await asyncio.wait(
                {asking, closed}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            closed.cancel()
        if self._closed.is_set() or not asking.done():
            raise NotYet
        return asking.result()

    def _acknowledge(self, number: int) -> None:
        """An acknowledgement that comes twice does not count for the batch after."""
        asking = self._asking
        if asking is None or not asking.done() or asking.cancelled():
            return
        if asking.exception() is None:
            batch = asking.result()
            if batch is not None and batch.number == number:
                self._asking = None

    async def close(self) -> None:
        """Send away who waits."""
        self._closed.set()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
