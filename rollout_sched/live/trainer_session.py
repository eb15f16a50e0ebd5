"""Trainers at work: prompts in, batches out, weights published."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

from rollout_sched.core.actions import Deliver
from rollout_sched.core.events import BatchRequested, SubmissionsClosed
from rollout_sched.live.batch_delivery import BatchDelivery
from rollout_sched.live.draft_test import DraftTest
from rollout_sched.live.driver import Driver
from rollout_sched.live.leases import TRAINER, Leases
from rollout_sched.live.length_store import LengthStore
from rollout_sched.live.ports import WeightLoader
from rollout_sched.live.recovery import Recovered
from rollout_sched.live.restored_payloads import RestoredPayloads
from rollout_sched.live.reward_function import RewardFunction
from rollout_sched.live.sample_payloads import SamplePayloads
from rollout_sched.live.samples import Batch, Prompt, batch_of
from rollout_sched.live.stored_session import StoredSession
from rollout_sched.live.submissions import Submissions
from rollout_sched.live.tools import NamedTools
from rollout_sched.live.trajectory import Tool
from rollout_sched.live.weight_publisher import WeightPublisher


class Borrower(Protocol):
    """A trainer on the instances' GPUs, which begins before its batch is whole on those that are
    lent to it (`[lending]`). What it raises is logged."""

    def lent(self, instance: str) -> None:
        """The instance holds no work and stands still: its GPUs are the trainer's, until it says
        `give_back`."""

    def reclaimed(self, instance: str) -> None:
        """Nothing goes on without it: it is to be given back as soon as can be."""


class TrainerSession:
    """What trainers may do, on top of a driver: one of them, or several that share its batches.

    `stream_every`: tokens between partial results of an instance, so that they survive its death;
    0 does not stream, which is faster, and loses what a dying instance had not answered. `seed`: of
    the dice that verify drafts. `lengths`: what is known of prompts from earlier runs, and learns
    from this one. `borrower`: the trainer, if it shares the instances' GPUs. `stored`: where
    all is before it is handed out. `rewards`: what samples are worth, and which
    groups are kept for that. `tools`: by name, so that trajectories survive this process.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        stream_every: int = 0,
        seed: int = 0,
        lengths: LengthStore | None = None,
        borrower: Borrower | None = None,
        stored: StoredSession | None = None,
        rewards: RewardFunction | None = None,
        tools: NamedTools | None = None,
    ) -> None:
        self.driver = driver
        self._stored = stored
        self._shares_gpus = borrower is not None
        if borrower is not None:
            driver.lending.on_lent, driver.lending.on_reclaimed = borrower.lent, borrower.reclaimed
        leniency = driver.view.leniency
        test = None if leniency is None else DraftTest(leniency, seed)
        self.submissions = Submissions(
            driver,
            SamplePayloads(stream_every, test, driver.max_model_len),
            lengths=lengths,
            stored=stored,
            rewards=rewards,
            tools=tools or NamedTools({}),
        )
        self.weights = WeightPublisher(driver, stored)
        self.batches = BatchDelivery(
            self._request,
            Leases(driver.settings.lease_s, None if stored is None else stored.leased),
            self._acknowledged,
            asyncio.get_running_loop().time,
        )
        self._telling_before = -1  # the number of the last batch that only told of lost groups
        driver.front.endings.on_deliver = self._deliver
        driver.front.endings.on_group_failed = self._fail
        driver.front.endings.on_group_filtered = self._filter
        driver.on_broken = self._check_end

    @property
    def version(self) -> int:
        """The newest version published."""
        return self.weights.newest

    def submit(self, prompts: Iterable[Prompt], tool: Tool | None = None) -> None:
        """Queue groups. Raises CallerError at the first that cannot be; those before it stay.

        With a `tool` their samples are trajectories of several turns. One that is here already, or
        in a batch that is not acknowledged, is taken once: it may be submitted again by who does
        not know whether it has arrived. Another prompt under its uid is a CallerError, and so is a
        new group after submissions were closed; not one of whose failure a batch is still to tell.
        """
        self.submissions.submit(prompts, tool)

    async def durable(self) -> None:
        """Until all that has happened is in the store, as durable as it makes things. Raises
        StoreBroken."""
        if self._stored is not None:
            await self._stored.promise()

    def restore(self, found: Recovered, payloads: RestoredPayloads) -> None:
        """Go on from what an earlier run has left. To be called before the scheduler is."""
        assert found.state is not None
        run = found.state.run
        asked = run.takes_parts if run.trainer_waiting else None
        self.batches.restore(payloads.batches(), asked, found.leases)
        made = {
            group.group: payloads.factory(found.prompts[group.group])
            for group in found.state.groups
        }
        self.submissions.restore(found, made)
        self._telling_before = found.telling

    def unknown(self, uids: Iterable[str]) -> list[str]:
        """Of these groups those that are not here, nor in a batch that is not acknowledged."""
        known = {group.uid for group in self.submissions.lost} | self.batches.uids
        return [uid for uid in uids if uid not in known and self.submissions.known(uid) is None]

    def close_submissions(self) -> None:
        """No more prompts will come: the last batches may be short."""
        if not self.driver.view.run.closed:
            self.driver.tell(SubmissionsClosed())
            self._check_end()

    async def next_batch(
        self,
        acknowledged: int | None = None,
        timeout_s: float | None = None,
        *,
        trainer: str = TRAINER,
        part: int | None = None,
        parts: bool = False,
    ) -> Batch | None:
        """The batch after `acknowledged`, its number, that is this trainer's; None when submissions
        are closed and nothing is left.

        With `parts` what of it is whole, where the policy delivers in parts: it is asked for again
        until a part is the last. `part` says that of the batch `acknowledged` only the parts up to
        this one have arrived; what follows is the rest of it.

        Until it is acknowledged, or its lease ends, the same one comes again, so one that got lost
        on its way, or a wait that is cancelled, is no loss. Raises NotYet after `timeout_s`
        seconds, LeaseEnded if what is acknowledged is another trainer's.
        """
        self._check_end()  # what was asked for in an earlier run may be over since it was taken up
        batch: Batch | None = None
        try:
            batch = await self.batches.next(
                acknowledged, timeout_s, trainer=trainer, part=part, parts=parts
            )
            return batch
        finally:
            if batch is not None or acknowledged is not None:
                await self.durable()  # whose a batch is counts from when it is answered

    def close(self) -> None:
        """Nobody waits for a batch any more: whoever does, or asks for one, is told NotYet."""
        self.batches.close()

    def give_back(self, instance: str) -> None:
        """The trainer uses an instance no longer that was lent to it: before it publishes weights,
        so that all get them together. Raises CallerError if it is not lent, or was lost since."""
        self.driver.give_back(instance)

    async def publish_weights(
        self, version: int, apply: WeightLoader, *, said: bytes | None = None, wait: bool = False
    ) -> None:
        """Version `version` is ready; `apply(client, version)` loads it into one instance. `said`:
        what a later run can make that loader of; a store has to have it.

        With `wait`, until every instance that is here, and at least one, computes with it or a
        newer one (those that are lost meanwhile get it when they join again). Raises CallerError
        if versions do not grow, or a batch has come in part.
        """
        await self.weights.publish(version, apply, said, wait=wait)

    # -- what the driver says --------------------------------------------------------------

    def _request(self, parts: bool) -> None:
        self._check_end()
        if self.batches.awaited:
            self.driver.tell(BatchRequested(parts, shares_gpus=parts and self._shares_gpus))

    def _deliver(self, action: Deliver, payloads: list[Any]) -> None:
        samples = self.submissions.delivered(action, payloads)
        batch = batch_of(action, samples, self.submissions.take_lost(action.batch))
        if self._stored is None:
            self.batches.deliver(batch)
            return
        self.batches.expect(batch)
        handing_over = asyncio.ensure_future(self._stored.promise())
        handing_over.add_done_callback(partial(self._hand_over, batch))

    def _hand_over(self, batch: Batch, promise: asyncio.Future[None]) -> None:
        """It is in the store, and will be delivered again until it is acknowledged."""
        if promise.cancelled() or promise.exception() is not None:
            return  # the driver is broken then, and says so
        self.batches.deliver(batch)
        self._check_end()

    def _acknowledged(self, batch: int) -> None:
        self.submissions.acknowledged(batch)
        if self._stored is not None:
            self._stored.acknowledged(batch)

    def _fail(self, group: str, error: Exception | None) -> None:
        self.submissions.fail(group, error)
        self._check_end()

    def _filter(self, group: str) -> None:
        self.submissions.filter(group)
        self._check_end()

    def _check_end(self) -> None:
        """Whoever waits for a batch is told that none will come."""
        batches, run = self.batches, self.driver.view.run
        if not batches.awaited:
            return
        if self.driver.broken is not None:
            batches.fail(self.driver.broken)
        elif run.closed and not (batches.expected or self.submissions.prompts or batches.begun):
            batches.deliver(self._telling() if self.submissions.lost else None)

    def _telling(self) -> Batch:
        """A batch after the last, without samples; it is leased and kept as any other. Damage to a
        store may give more to tell after a restart: no two have one number."""
        run = self.driver.view.run
        number = self._telling_before = max(run.batches, self._telling_before + 1)
        last = Deliver(number, run.version, (), missing=run.lacking)
        if self._stored is not None:
            self._stored.telling(last)
        return batch_of(last, [], self.submissions.take_lost(number))
