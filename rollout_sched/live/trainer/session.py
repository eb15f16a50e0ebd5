"""The trainers' operations: submit prompts, get batches, publish weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.events import (
    BatchRequested,
    Event,
    InstanceJoined,
    InstanceLost,
    SubmissionsClosed,
    WeightsUpdated,
)
from rollout_sched.core.model.model import InstanceStatus
from rollout_sched.live.driver import Driver
from rollout_sched.live.instances.fleet import Borrower
from rollout_sched.live.ports import WeightLoader
from rollout_sched.live.requests.payloads import PayloadFactory
from rollout_sched.live.requests.trajectories import Tool
from rollout_sched.live.trainer.delivery import TRAINER, BatchDelivery, Leases
from rollout_sched.live.trainer.lengths import LengthStore
from rollout_sched.live.trainer.rewards import RewardFunction
from rollout_sched.live.trainer.samples import Batch, Mismatch, NamedTools, Prompt, batch_of
from rollout_sched.live.trainer.stored import Recovered, StoredSession, StoredWeights
from rollout_sched.live.trainer.submissions import SamplePayloads, Submissions

log = logging.getLogger(__name__)

#: In these states no update is running.
_LOADED = (InstanceStatus.SERVING, InstanceStatus.GATED)

#: Seconds between two checks, during a wait, that the scheduler is not broken.
_POLL_S = 1.0

_FLEET_EVENTS = (InstanceJoined, InstanceLost, WeightsUpdated)


class WeightPublisher:
    """Publishes new weights for a trainer, and waits until the fleet has loaded them. One sequence
    of versions for all trainers. `stored`: the store that each version is written to before
    `publish` returns. Publishing the newest again, encoded equally, has no effect: the answer to
    the first call may have been lost."""

    def __init__(self, driver: Driver, stored: StoredSession | None) -> None:
        self._driver = driver
        self._stored = stored
        self._published: StoredWeights | None = None
        self._fleet_changed = asyncio.Event()
        driver.pump.watch(self._fleet_event, *_FLEET_EVENTS)

    @property
    def newest(self) -> int:
        """The newest version published."""
        return self._driver.view.run.version

    def restore(self, weights: StoredWeights | None) -> None:
        """Continue from the newest weights of an earlier run."""
        self._published = weights

    def known(self, version: int, encoded: bytes) -> WeightLoader | None:
        """The loader of the newest version, if it was published like this."""
        same = version == self.newest and self._published == StoredWeights(version, encoded)
        return self._driver.fleet.loader if same else None

    async def publish(
        self,
        version: int,
        apply: WeightLoader,
        encoded: bytes | None = None,
        *,
        wait: bool = False,
    ) -> None:
        """Version `version` is ready; `apply(client, version)` loads it into one instance.
        `encoded`: the form from which a later run can make that loader; required with a store, and
        to publish a version twice.

        With `wait`, waits until all joined instances, and at least one, have loaded it or a newer
        one (instances lost meanwhile get it when they join again). Raises CallerError if the
        version does not grow, or a batch was delivered only in part.
        """
        if self._stored is not None and encoded is None:
            raise CallerError(
                "with a store, weights must be loadable after a restart, and a coroutine cannot "
                "be stored; pass Reload(path), Transfer(...) or Applied(), or run without a store"
            )
        if encoded is None or self.known(version, encoded) is None:
            self._driver.publish(version, apply)
            self._published = None if encoded is None else StoredWeights(version, encoded)
            if self._stored is not None and encoded is not None:
                self._stored.published(version, encoded)
        if self._stored is not None:
            await self._stored.promise()
        while wait and not self.has_loaded(version):
            self._fleet_changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._fleet_changed.wait()
            if self._driver.broken is not None:
                raise self._driver.broken

    def has_loaded(self, version: int) -> bool:
        """Whether all joined instances, and at least one, have loaded `version` or a newer one.

        The core counts an instance without work as updated when its update begins, because it
        makes no tokens meanwhile. A caller that wants to delete the weights must know that the
        update is over, so no update may be running.
        """
        here = self._driver.view.instances
        return bool(here) and all(
            instance.version >= version and instance.status in _LOADED for instance in here
        )

    def _fleet_event(self, event: Event) -> None:
        self._fleet_changed.set()


class TrainerSession:
    """The trainers' operations on top of a driver, for one trainer or several that share its
    batches.

    `stream_every`: tokens between partial results of an instance, which survive its death; 0: no
    streaming, which is faster, but loses unfinished tokens if the instance dies. `lengths`: lengths
    of prompts from earlier runs, which also learns from this one. `borrower`: the trainer, if it
    shares the instances' GPUs. `stored`: the store, which has everything before it is delivered.
    `rewards`: computes rewards and decides which groups are kept. `tools`: by name, so that
    trajectories survive this process.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        stream_every: int = 0,
        lengths: LengthStore | None = None,
        borrower: Borrower | None = None,
        stored: StoredSession | None = None,
        rewards: RewardFunction | None = None,
        tools: NamedTools | None = None,
    ) -> None:
        self.driver = driver
        self._stored = stored
        self._shares_gpus = borrower is not None
        driver.fleet.borrower = borrower
        self.submissions = Submissions(
            driver,
            SamplePayloads(stream_every, driver.max_model_len),
            lengths=lengths,
            stored=stored,
            rewards=rewards,
            tools=tools or NamedTools({}),
        )
        self.weights = WeightPublisher(driver, stored)
        self.batches = BatchDelivery(
            self._request,
            Leases(driver.settings.lease_s, None if stored is None else stored.leased),
            self.submissions.acknowledged,
            asyncio.get_running_loop().time,
        )
        self.mismatch: Mismatch | None = None  # as last reported
        self._last_report = -1  # number of the last batch that only reported lost groups
        driver.front.endings.on_deliver = self._deliver
        driver.front.endings.on_group_failed = self._fail
        driver.front.endings.on_group_filtered = self._filter
        driver.on_broken = self._check_end

    def submit(self, prompts: Iterable[Prompt], tool: Tool | None = None) -> list[str]:
        """Queue groups. Returns the uids of groups whose batch is acknowledged: they are not
        generated again. Raises CallerError at the first invalid group; those before it stay queued.

        With a `tool` their samples are trajectories of several turns. Submitting a group again has
        no effect unless it has failed. Another prompt under its uid is a CallerError. So is a new
        group after submissions were closed, but not a failed group that a batch has yet to report.
        """
        return self.submissions.submit(prompts, tool)

    async def durable(self) -> None:
        """Wait until all events so far are in the store, as durable as it is set to be. Raises
        StoreBroken."""
        if self._stored is not None:
            await self._stored.promise()

    def restore(
        self, found: Recovered, batches: list[Batch], factories: Mapping[str, PayloadFactory]
    ) -> None:
        """Continue from what an earlier run has left: its unacknowledged batches, in order, and the
        factory of the samples of each open group. Call it before the scheduler is restored."""
        assert found.state is not None
        run = found.state.run
        asked = run.takes_parts if run.trainer_waiting else None
        self.batches.restore(batches, asked, found.leases)
        self.submissions.restore(found, factories)
        self.weights.restore(found.weights)
        self._last_report = found.last_report

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
        """The batch of this trainer after the one with the number `acknowledged`; None when
        submissions are closed and nothing is left.

        With `parts`, returns the groups that are complete, if the policy delivers in parts; call it
        again until a part is the last. `part`: of the batch `acknowledged` only the parts up to
        this one were received; the rest of it follows.

        The same batch comes again until it is acknowledged or its lease expires, so a lost answer
        or a cancelled wait does no harm. Raises NotReady after `timeout_s` seconds, and LeaseEnded
        if the acknowledged batch belongs to another trainer.
        """
        self._check_end()  # a batch requested in an earlier run may need an end now
        batch: Batch | None = None
        try:
            batch = await self.batches.next(
                acknowledged, timeout_s, trainer=trainer, part=part, parts=parts
            )
            return batch
        finally:
            if batch is not None or acknowledged is not None:
                await self.durable()  # the lease must be stored before the answer

    def report_mismatch(self, mismatch: Mismatch) -> None:
        """A trainer has compared its log-probs with the rollouts'. Logs when the mismatch exceeds
        `max_mismatch`, once until it is below again."""
        most = self.driver.settings.max_mismatch
        before, self.mismatch = self.mismatch, mismatch
        if most and mismatch.k3() > most and (before is None or before.k3() <= most):
            log.warning(
                "log-probs of trainer and rollouts differ under the same weights, version %d: k3 "
                "%.2g, above [live] max_mismatch %g; truncate importance weights, and compare "
                "precision, sampling parameters and weights of engine and trainer",
                mismatch.version,
                mismatch.k3(),
                most,
            )

    def close(self) -> None:
        """Every current or later wait for a batch raises NotReady."""
        self.batches.close()

    # -- what the driver says --------------------------------------------------------------

    def _request(self, parts: bool) -> None:
        self._check_end()
        if self.batches.awaited:
            self.driver.tell(BatchRequested(parts, shares_gpus=parts and self._shares_gpus))

    def _deliver(self, action: Deliver, payloads: list[Any]) -> None:
        samples = self.submissions.delivered(action, payloads)
        lost = self.submissions.take_lost(action.batch)
        batch = batch_of(action, samples, lost, self.submissions.delivered_prompts(action.batch))
        if self._stored is None:
            self.batches.deliver(batch)
            return
        self.batches.expect(batch)
        handing_over = asyncio.ensure_future(self._stored.promise())
        handing_over.add_done_callback(partial(self._hand_over, batch))

    def _hand_over(self, batch: Batch, promise: asyncio.Future[None]) -> None:
        """The batch is in the store, and will be delivered again until it is acknowledged."""
        if promise.cancelled() or promise.exception() is not None:
            return  # the driver is broken then, and reports it
        self.batches.deliver(batch)
        self._check_end()

    def _fail(self, group: str, error: Exception | None) -> None:
        self.submissions.fail(group, error)
        self._check_end()

    def _filter(self, group: str) -> None:
        self.submissions.filter(group)
        self._check_end()

    def _check_end(self) -> None:
        """If no batch can come any more, end the waits for one."""
        batches, run = self.batches, self.driver.view.run
        if not batches.awaited:
            return
        if self.driver.broken is not None:
            batches.fail(self.driver.broken)
        elif run.closed and not (batches.expected or self.submissions.prompts or batches.begun):
            batches.deliver(self._loss_report() if self.submissions.lost else None)

    def _loss_report(self) -> Batch:
        """A batch after the last that only reports lost groups; leased and kept like any other.
        After a restart a damaged store may add more losses, so each gets a new number."""
        run = self.driver.view.run
        number = self._last_report = max(run.batches, self._last_report + 1)
        last = Deliver(number, run.version, (), missing=run.wanted)
        if self._stored is not None:
            self._stored.record_report(last)
        return batch_of(last, [], self.submissions.take_lost(number), {})
