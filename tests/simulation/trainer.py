"""Trainers, each in its own process, over HTTP; after a death they continue from their
checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rollout_sched.client.remote.calls import GatewayError
from rollout_sched.client.remote.client import ForgottenPrompts
from rollout_sched.client.rollout_scheduler import RolloutScheduler
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm.weight_updates import Applied, Reload, Transfer
from rollout_sched.live.requests.trajectories import Tool
from rollout_sched.live.trainer.delivery import TRAINER, LeaseEnded
from rollout_sched.live.trainer.samples import Batch, Prompt
from tests.simulation import gateway, tools
from tests.simulation.around_us import WeightsAroundUs
from tests.simulation.faults import GatewayDies, Moment, RowRots, TokensRot, TrainerDies
from tests.simulation.kernel import Process
from tests.simulation.ledger import Receipt
from tests.simulation.plan import AROUND_US, Weights

if TYPE_CHECKING:
    from tests.simulation.world import World

#: Seconds before a failed call is repeated.
AGAIN_S = 1.0

#: Checks whether the scheduler has noticed weights that were not reported.
LOOKS = 20

#: Groups in one submission.
PORTION = 5

#: Temporary refusals: a full disk, and another trainer in the middle of a batch.
PASSING = ("disk is full", "parts")


def _how(weights: Weights) -> Any:
    """How an instance gets new weights."""
    if weights in AROUND_US:
        return Applied()
    return Transfer({}) if weights == "transfer" else Reload("/", visible_here=False)


class Trainer:
    """A trainer of the run, with its share of the prompts. `done` is set when it has received
    everything. `batch` and `version` belong to its checkpoint."""

    def __init__(self, world: World, number: int, prompts: list[Prompt]) -> None:
        self.done = asyncio.Event()
        self.host = f"127.0.2.{number + 1}"
        self.batch: int | None = None
        self.version = 0
        self.dies_at: dict[Moment, TrainerDies] = {}
        self._world = world
        self._alone = world.plan.trainers == 1
        self._named = "the trainer" if self._alone else f"trainer {number}"
        self._name = TRAINER if self._alone else f"trainer-{number}"
        self._prompts = prompts
        self._parts: list[Batch] = []  # of the current batch
        self.process: Process | None = None
        self._around: WeightsAroundUs | None = None
        if world.plan.weights in AROUND_US:
            self._around = WeightsAroundUs(world, world.plan.pause_mode)

    def start(self) -> None:
        process = self.process = self._world.spawn(self._named, self.host)
        process.start(self._main())
        if self._around is not None:
            process.start(self._around.keep_up())

    def die(self, fault: TrainerDies) -> None:
        world, process = self._world, self.process
        if world.plan.in_process:
            world.gateway.die(GatewayDies(at_s=fault.at_s, for_s=fault.for_s))
        elif process is not None:
            self.process = None
            process.kill()
            world.network.gone(process, silently=False)
            world.kernel.call_later(fault.for_s, self.start)

    async def _main(self) -> None:
        while True:
            try:
                async with RolloutScheduler.connect(gateway.URL, trainer=self._name) as rollouts:
                    await self.train(rollouts)
                    break
            except GatewayError as error:
                self._world.note(f"{self._named} connects again: {error}")
                await asyncio.sleep(AGAIN_S)

    async def train(self, rollouts: RolloutScheduler) -> None:
        """Train until nothing is left."""
        self._parts = []
        if self.batch is not None:
            rollouts.acknowledge(self.batch)
        await self._submit_all(rollouts)
        await self._publish(rollouts)
        closing = asyncio.ensure_future(self._close_in_time(rollouts))
        try:
            await self._take_all(rollouts)
        finally:
            closing.cancel()
        self._world.note(f"{self._named} has received everything")
        self.done.set()

    async def _take_all(self, rollouts: RolloutScheduler) -> None:
        while True:
            part = await self._next(rollouts)
            if part is None:
                break
            if self._parts and self._parts[-1].number != part.number:
                self._parts = []
            self._parts.append(part)
            await self._reach("received")
            if part.last:
                await self._step(rollouts, _whole(self._parts))

    async def _submit_all(self, rollouts: RolloutScheduler) -> None:
        """After a restart also what is acknowledged, unless the store may have lost that. Several
        trainers wait for each other before they close submissions."""
        ledger, faults = self._world.ledger, self._world.plan.faults
        ended = ledger.over
        if not any(isinstance(fault, TokensRot | RowRots) for fault in faults):
            ended = ended - ledger.acknowledged.keys() - ledger.filtered
        if self._alone or not ledger.is_all_accepted:
            await self._submit(rollouts, [p for p in self._prompts if p.uid not in ended])
        while not (self._alone or ledger.is_all_accepted):
            await asyncio.sleep(AGAIN_S)
        if not self._world.plan.open_s:
            await self._until_done(rollouts.close_submissions)

    @property
    def _is_open(self) -> bool:
        return self._world.kernel.time() < self._world.plan.open_s

    async def _close_in_time(self, rollouts: RolloutScheduler) -> None:
        """Close the submissions later, unless they are closed at once."""
        if self._world.plan.open_s:
            await asyncio.sleep(max(0, self._world.plan.open_s - self._world.kernel.time()))
            await self._until_done(rollouts.close_submissions)

    async def _submit_again(self, rollouts: RolloutScheduler, batch: Batch) -> None:
        """Submit failed prompts again, before the batch that reports them is acknowledged."""
        ledger = self._world.ledger
        for prompt in ledger.may_be_again(batch) if self._is_open else ():
            tool = tools.of(prompt)
            try:
                await self._until_done(
                    lambda prompt=prompt, tool=tool: rollouts.submit([prompt], tool=tool)
                )
            except CallerError as error:
                self._world.note(f"{self._named} does not submit {prompt.uid} again: {error}")
                if self._is_open:
                    raise
                return
            self._world.note(f"{self._named} has submitted {prompt.uid} again")
            ledger.submitted_again(prompt.uid, batch.number)

    async def _next(self, rollouts: RolloutScheduler) -> Batch | None:
        ledger, kernel = self._world.ledger, self._world.kernel
        while True:
            await self._reach("asking")
            asked_s = kernel.time()
            try:
                batch = await rollouts.next_batch(parts=self._world.plan.parts)
            except ForgottenPrompts as forgotten:
                ledger.forgotten(forgotten.uids)
                await self._submit(rollouts, [ledger.prompts[uid] for uid in forgotten.uids])
                if not self._is_open:
                    await self._until_done(rollouts.close_submissions)
                continue
            except LeaseEnded as error:
                self._world.note(f"{self._named}: {error}")
                ledger.lease_ended(self._name)
                self.batch, self._parts = None, []
                continue
            if self.batch is not None:
                ledger.acknowledge(self.batch, self._name)
            if batch is not None:
                self._world.note(
                    f"{self._named} has batch {batch.number}.{batch.part} of version"
                    f" {batch.version}: {sorted(batch.groups())}, failed"
                    f" {[g.uid for g in batch.failed]}, filtered {batch.filtered}"
                )
                ledger.delivered(batch, self._name, Receipt(asked_s, kernel.time()))
            return batch

    async def _step(self, rollouts: RolloutScheduler, batch: Batch) -> None:
        ledger = self._world.ledger
        if batch.samples:
            await asyncio.sleep(self._world.plan.train_s)
        await self._submit_again(rollouts, batch)
        ledger.train(batch, self._name)
        self.batch = batch.number
        self.version = self.version + 1 if self._alone else max(ledger.published) + 1
        await self._reach("trained")
        await self._publish(rollouts)
        await self._reach("published")

    async def _submit(self, rollouts: RolloutScheduler, prompts: list[Prompt]) -> None:
        for at in range(0, len(prompts), PORTION):
            portion = prompts[at : at + PORTION]
            for tool, group in _by_tool(portion):
                await self._until_done(
                    lambda tool=tool, group=group: rollouts.submit(group, tool=tool)
                )
            self._world.ledger.accepted.update(prompt.uid for prompt in portion)

    async def _publish(self, rollouts: RolloutScheduler) -> None:
        """Publish its newest version, unless it is already published. A trainer that loads weights
        around the gateway publishes, too: a scheduler that has noticed them promises nothing."""
        ledger, around = self._world.ledger, self._around
        says_so = self.version > 0 and self._world.plan.weights == "applied"
        if around is not None and around.version < self.version:
            ledger.published.append(self.version)
            around.bring(self.version)
            await around.are_there()

        async def publish() -> None:
            if says_so or (await rollouts.state())["version"] < self.version:
                ledger.published.append(self.version)
                try:
                    await rollouts.publish_weights(self.version, _how(self._world.plan.weights))
                except CallerError:
                    if (await rollouts.state())["version"] < self.version:
                        raise

        if self._world.plan.weights != "around" or not await self._is_noticed(rollouts):
            await self._until_done(publish)

    async def _is_noticed(self, rollouts: RolloutScheduler) -> bool:
        """Whether the scheduler notices its newest version without a report. A restarted scheduler
        that has never seen a load takes newer weights for those of another run."""
        for _ in range(LOOKS):
            try:
                if (await rollouts.state())["version"] >= self.version:
                    return True
            except GatewayError as error:
                self._world.note(f"{self._named} asks again: {error}")
            await asyncio.sleep(AGAIN_S)
        return False

    async def _until_done(self, call: Callable[[], Awaitable[None]]) -> None:
        """Repeat the call: a gateway that is away or full recovers later."""
        while True:
            try:
                return await call()
            except GatewayError as error:
                self._world.note(f"{self._named} tries again: {error}")
            except CallerError as error:
                if not any(passing in str(error) for passing in PASSING):
                    raise
            await asyncio.sleep(AGAIN_S)

    async def _reach(self, moment: Moment) -> None:
        fault = self.dies_at.get(moment)
        if fault is not None and fault.at_s <= self._world.kernel.time():
            del self.dies_at[moment]
            self._world.note(f"{self._named} is dead, having {moment}")
            self.die(fault)
            await asyncio.sleep(0)  # never returns


def _by_tool(prompts: list[Prompt]) -> Iterable[tuple[Tool | None, list[Prompt]]]:
    for tool, group in groupby(prompts, tools.of):
        yield tool, list(group)


def _whole(parts: list[Batch]) -> Batch:
    last = parts[-1]
    samples = [sample for part in parts for sample in part.samples]
    failed = [group for part in parts for group in part.failed]
    filtered = [uid for part in parts for uid in part.filtered]
    return Batch(last.number, last.version, samples, failed, last.part, filtered=filtered)
