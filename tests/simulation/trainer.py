"""A trainer in a process of its own, over HTTP, which goes on from its checkpoint when it died."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from rollout_sched.client.new_weights import Reload, Transfer
from rollout_sched.client.rollout_scheduler import RolloutScheduler
from rollout_sched.client.submitted_prompts import ForgottenPrompts
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.trainer_client import GatewayError
from rollout_sched.live.samples import Batch, Prompt
from tests.simulation import gateway
from tests.simulation.faults import Moment, TrainerDies
from tests.simulation.kernel import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

HOST = "127.0.2.1"

#: Seconds before what has failed is tried again.
AGAIN_S = 1.0

#: Groups in one submission.
PORTION = 5


class Trainer:
    """`done` is set when it has had everything. `batch` and `version` are its checkpoint's."""

    def __init__(self, world: World, prompts: list[Prompt]) -> None:
        self.done = asyncio.Event()
        self.batch: int | None = None
        self.version = 0
        self.dies_at: dict[Moment, TrainerDies] = {}
        self._world = world
        self._prompts = prompts
        self._process: Process | None = None

    def start(self) -> None:
        self._process = self._world.spawn("trainer", HOST)
        self._process.start(self._main())

    def die(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._world.network.gone(process, silently=False)

    async def _main(self) -> None:
        while True:
            try:
                async with RolloutScheduler.connect(gateway.URL) as rollouts:
                    await self._train(rollouts)
                    break
            except GatewayError as error:
                self._world.note(f"the trainer connects again: {error}")
                await asyncio.sleep(AGAIN_S)
        self._world.note("the trainer has had everything")
        self.done.set()

    async def _train(self, rollouts: RolloutScheduler) -> None:
        if self.batch is not None:
            rollouts.acknowledge(self.batch)
        ledger = self._world.ledger
        gone = ledger.trained.keys() | ledger.failed.keys()
        await self._submit(rollouts, [each for each in self._prompts if each.uid not in gone])
        await self._publish(rollouts)
        parts: list[Batch] = []
        while True:
            part = await self._next(rollouts)
            if part is None:
                return
            if parts and parts[-1].number != part.number:
                parts = []
            parts.append(part)
            await self._reach("received")
            if part.last:
                await self._step(rollouts, _whole(parts))

    async def _next(self, rollouts: RolloutScheduler) -> Batch | None:
        while True:
            await self._reach("asking")
            try:
                batch = await rollouts.next_batch(parts=self._world.plan.parts)
            except ForgottenPrompts as forgotten:
                self._world.ledger.forgotten(forgotten.uids)
                lost = [self._world.ledger.prompts[uid] for uid in forgotten.uids]
                await self._submit(rollouts, lost)
                continue
            if self.batch is not None:
                self._world.ledger.acknowledge(self.batch)
            if batch is not None:
                self._world.note(
                    f"batch {batch.number}.{batch.part} of version {batch.version}:"
                    f" {sorted(batch.groups())} failed {[g.uid for g in batch.failed]}"
                )
                self._world.ledger.delivered(batch)
            return batch

    async def _step(self, rollouts: RolloutScheduler, batch: Batch) -> None:
        if batch.samples:
            await asyncio.sleep(self._world.plan.train_s)
        self._world.ledger.train(batch)
        self.batch = batch.number
        self.version += 1
        await self._reach("trained")
        await self._publish(rollouts)
        await self._reach("published")

    async def _submit(self, rollouts: RolloutScheduler, prompts: list[Prompt]) -> None:
        for at in range(0, len(prompts), PORTION):
            portion = prompts[at : at + PORTION]
            await self._until_done(lambda portion=portion: rollouts.submit(portion))
            self._world.ledger.accepted.update(prompt.uid for prompt in portion)
        await self._until_done(rollouts.close_submissions)

    async def _publish(self, rollouts: RolloutScheduler) -> None:
        """Its newest version, unless the gateway knows of it."""
        how: Any = Reload("/", visible_here=False)
        if self._world.plan.weights == "transfer":
            how = Transfer({})

        async def publish() -> None:
            if (await rollouts.state())["version"] < self.version:
                self._world.ledger.published.append(self.version)
                try:
                    await rollouts.publish_weights(self.version, how)
                except CallerError:
                    if (await rollouts.state())["version"] < self.version:
                        raise

        await self._until_done(publish)

    async def _until_done(self, call: Callable[[], Awaitable[None]]) -> None:
        """A gateway that is away or has no room now will have it later."""
        while True:
            try:
                return await call()
            except GatewayError as error:
                self._world.note(f"the trainer tries again: {error}")
            except CallerError as error:
                if "disk is full" not in str(error):
                    raise
            await asyncio.sleep(AGAIN_S)

    async def _reach(self, moment: Moment) -> None:
        fault = self.dies_at.get(moment)
        if fault is not None and fault.at_s <= self._world.kernel.time():
            del self.dies_at[moment]
            self._world.note(f"the trainer is dead, having {moment}")
            self.die()
            self._world.kernel.call_later(fault.for_s, self.start)
            await asyncio.sleep(0)  # from which it does not return


def _whole(parts: list[Batch]) -> Batch:
    last = parts[-1]
    samples = [sample for part in parts for sample in part.samples]
    failed = [group for part in parts for group in part.failed]
    return Batch(last.number, last.version, samples, failed, last.part)
