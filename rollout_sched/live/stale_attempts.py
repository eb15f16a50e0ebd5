"""Aborts attempts of an earlier run that an instance may still work on."""

from __future__ import annotations

import asyncio
import logging

from rollout_sched.core.events import InstanceJoined
from rollout_sched.live.asking import ask
from rollout_sched.live.driver import Driver

log = logging.getLogger(__name__)


class StaleAttempts:
    """Aborts them when their instance joins. No attempt of this run has their numbers, so their
    answers would be ignored.

    `running`: (instance, attempt); `run_id`: of the earlier run (see `live.driver`).
    """

    def __init__(self, driver: Driver, run_id: str, running: list[tuple[str, int]]) -> None:
        self._driver = driver
        self._orders: dict[str, list[str]] = {}
        for instance, attempt in running:
            self._orders.setdefault(instance, []).append(f"{run_id}-{attempt}")
        self._aborting: set[asyncio.Task[None]] = set()
        driver.pump.watch(self._joined, InstanceJoined)

    def close(self) -> None:
        for task in self._aborting:
            task.cancel()

    def _joined(self, event: InstanceJoined) -> None:
        orders = self._orders.pop(event.instance, None)
        if orders:
            task = asyncio.ensure_future(self._abort(event.instance, orders))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _abort(self, instance: str, orders: list[str]) -> None:
        """Each abort is sent once: an attempt that is not stopped finishes, which only costs
        time."""
        client = self._driver.supervisors[instance].client
        limit_s = self._driver.settings.control_timeout_s
        for order in orders:
            try:
                await ask(client.abort(order), limit_s)
            except Exception as error:
                log.warning("%s of an earlier run on %s: %s", order, instance, error)
