"""A trainer with the scheduler in its own process (`from_toml`): both die together, and its tools
are coroutines of that process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rollout_sched.client.in_process import InProcess
from rollout_sched.client.rollout_scheduler import RolloutScheduler
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.settings import Settings
from rollout_sched.store.errors import StoreBroken
from tests.simulation import tools
from tests.simulation.gateway import Gateway
from tests.simulation.kernel import Process

if TYPE_CHECKING:
    from tests.simulation.world import World


class TrainersProcess(Gateway):
    """Takes the place of the gateway."""

    def __init__(self, world: World, folder: Path, settings: Settings) -> None:
        super().__init__(world, folder, settings)
        self._world = world
        self._rollouts: InProcess | None = None

    def _make(self) -> LiveScheduler:
        plan = self._world.plan
        rollouts = RolloutScheduler.from_toml(
            self._world.policy,
            self.instances,
            allow_code=True,
            prompts_per_step=plan.prompts_per_step,
            stream_every=plan.stream_every,
            store=self.store,
            settings=self.settings,
            tools=tools.NAMED,
        )
        made = self._rollouts = cast(InProcess, rollouts)
        live = made._start()  # before the first event, so that all events are observed
        made._start = lambda: live
        return live

    async def _work(self) -> None:
        (trainer,), made = self._world.trainers, self._rollouts
        assert made is not None
        try:
            async with made as rollouts:
                await trainer.train(rollouts)
                await asyncio.Event().wait()  # until it is stopped
        except StoreBroken as error:
            self._world.note(f"the trainer ends: {error}")
            self.kill()

    async def _close(self) -> None:
        await self._end_work()

    def forget(self) -> Process | None:
        self._rollouts = None
        return super().forget()
