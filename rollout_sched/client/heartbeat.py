"""Renews a trainer's lease while the trainer is busy training."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future

from rollout_sched.client.loop_thread import LoopThread
from rollout_sched.core.model.errors import RolloutError
from rollout_sched.integrations.gateway.control_plane import TrainerCalls

log = logging.getLogger(__name__)

#: Renewals per lease time: two renewals in a row may be lost or stay unanswered.
BEATS = 4


class Heartbeat:
    """Renews over its own connection and in its own thread, because most trainers train in the
    event loop in which they wait for batches. It ends with the process."""

    def __init__(self, gateway: TrainerCalls, trainer: str) -> None:
        self._gateway = gateway
        self._trainer = trainer
        self._lease_s = 0.0
        self._thread: LoopThread | None = None
        self._beating: Future[None] | None = None

    def every(self, lease_s: float) -> None:
        """Renew leases that last `lease_s` seconds; 0: leases do not expire, nothing is renewed."""
        if lease_s == self._lease_s:
            return
        self.close()
        self._lease_s = lease_s
        if lease_s:
            self._thread = LoopThread()
            self._thread.open("lease")
            self._beating = self._thread.start(self._beat(lease_s / BEATS))

    def close(self) -> None:
        if self._thread is not None and self._beating is not None:
            self._beating.cancel()
            self._thread.stop()
            self._thread = self._beating = None

    async def _beat(self, every_s: float) -> None:
        await self._gateway.open()
        try:
            await asyncio.sleep(every_s)
            while True:  # at a fixed rate, whether or not the last renewal was answered
                await asyncio.gather(self._renew(every_s), asyncio.sleep(every_s))
        finally:
            await self._gateway.close()

    async def _renew(self, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self._gateway.post("/rollout/v1/batches/renew", {"trainer": self._trainer})
        except (RolloutError, TimeoutError) as error:
            told = str(error) or f"no answer within {within_s:g} s"
            log.warning("the lease of trainer %s was not renewed: %s", self._trainer, told)
