"""Scheduling in the trainer's own process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from rollout_sched.client.rollout_scheduler import NOTHING, RolloutScheduler
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.sglang import EngineInstance
from rollout_sched.integrations.vllm.weight_updates import (
    Apply,
    WeightLoaders,
    is_coroutine,
    update_of,
)
from rollout_sched.live import LiveScheduler
from rollout_sched.live.ports import InstanceClient
from rollout_sched.live.requests import Tool
from rollout_sched.live.trainer.samples import Batch, Mismatch, Prompt

log = logging.getLogger(__name__)


class InProcess(RolloutScheduler):
    """Runs its own driver. `start` creates it once there is an event loop.

    A batch counts as received when the next one is requested.
    """

    def __init__(
        self,
        start: Callable[[], LiveScheduler],
        instances: Sequence[str | InstanceClient],
        api_key: str | None,
        trainer: str,
    ) -> None:
        if isinstance(instances, str):
            raise CallerError(f"instances is {instances!r}; give a list: [{instances!r}]")
        self._start = start
        self._instances = instances
        self._api_key = api_key
        self._trainer = trainer
        self._started: LiveScheduler | None = None
        self._received = NOTHING
        self._weight_loaders: WeightLoaders

    @property
    def _live(self) -> LiveScheduler:
        if self._started is None:
            raise CallerError("the scheduler is not started; use `async with`")
        return self._started

    async def __aenter__(self) -> Self:
        self._received = NOTHING
        self._started = self._start()
        self._weight_loaders = WeightLoaders(self._live.driver)
        self._weight_loaders.restore(self._live.records.weights)
        try:
            await asyncio.gather(*(self._take_in(i, patient=True) for i in self._instances))
        except BaseException:
            await self._live.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._live.close()

    async def _submit(self, prompts: Iterable[Prompt], tool: Tool | None) -> list[str]:
        try:
            return self._live.trainer.submit(prompts, tool)
        finally:
            await self._live.trainer.durable()

    async def close_submissions(self) -> None:
        self._live.trainer.close_submissions()
        await self._live.trainer.durable()

    async def _next_batch(self, parts: bool) -> Batch | None:
        number, part = self._received
        batch = await self._live.trainer.next_batch(
            number, trainer=self._trainer, part=part, parts=parts
        )
        if batch is not None:
            self._received = batch.number, batch.part
        return batch

    async def _publish_weights(self, version: int, apply: Apply, wait: bool) -> None:
        if is_coroutine(apply):
            await self._live.trainer.weights.publish(version, apply, wait=wait)
            return
        update = update_of(version, apply)
        await self._weight_loaders.publish(update, self._live.trainer.weights, wait=wait)

    async def report_mismatch(self, mismatch: Mismatch) -> None:
        self._live.trainer.report_mismatch(mismatch)

    async def return_instance(self, url: str) -> None:
        self._live.driver.fleet.return_instance(url.rstrip("/"))

    async def add_instance(self, instance: str | InstanceClient) -> None:
        await self._take_in(instance, patient=False)

    async def remove_instance(self, url: str, *, drain: bool = False) -> None:
        await self._live.driver.remove_instance(url.rstrip("/"), drain=drain)

    async def state(self) -> dict[str, Any]:
        return self._live.state()

    async def _take_in(self, instance: str | InstanceClient, *, patient: bool) -> None:
        client: InstanceClient
        if isinstance(instance, str):
            client = EngineInstance(instance, api_key=self._api_key)
        else:
            client = instance
        driver = self._live.driver
        if await driver.add_instance(client, patient=patient) is None:
            why = driver.supervisors[client.name].reason
            log.warning("instance %s: away, joins when it is ready (%s)", client.name, why)
