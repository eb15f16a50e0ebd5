"""One trainer at work: prompts in, batches out, weights published. One trainer per scheduler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import msgspec

from rollout_sched.core.actions import Deliver
from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.core.events import (
    BatchRequested,
    Event,
    GroupSubmitted,
    InstanceJoined,
    InstanceLost,
    SubmissionsClosed,
    WeightsUpdated,
)
from rollout_sched.core.model import InstanceStatus
from rollout_sched.live.batch_delivery import BatchDelivery
from rollout_sched.live.draft_test import DraftTest
from rollout_sched.live.driver import Driver
from rollout_sched.live.length_store import LengthStore
from rollout_sched.live.payloads import TokenPayload
from rollout_sched.live.ports import WeightLoader
from rollout_sched.live.prompt_checks import check_prompt
from rollout_sched.live.recovery import Recovered
from rollout_sched.live.restored_payloads import RestoredPayloads
from rollout_sched.live.reward_book import RewardBook
from rollout_sched.live.reward_function import RewardFunction
from rollout_sched.live.samples import Batch, LostGroup, Prompt, Reward, batch_of, sample_of
from rollout_sched.live.store_keeper import StoreKeeper
from rollout_sched.live.trajectory import Tool, TrajectoryPayload

#: No update is under way.
_LOADED = (InstanceStatus.SERVING, InstanceStatus.GATED)

#: Seconds between two looks at whether a scheduler that is waited for can still go on.
_LOOK_S = 1.0

_FLEET_EVENTS = (InstanceJoined, InstanceLost, WeightsUpdated)


class Borrower(Protocol):
    """A trainer on the instances' GPUs, which begins before its batch is whole on those that are
    lent to it (`[lending]`). What it raises is logged."""

    def lent(self, instance: str) -> None:
        """The instance holds no work and stands still: its GPUs are the trainer's, until it says
        `give_back`."""

    def reclaimed(self, instance: str) -> None:
        """Nothing goes on without it: it is to be given back as soon as can be."""


class TrainerSession:
    """What a trainer may do, on top of a driver.

    `stream_every`: tokens between partial results of an instance, so that they survive its death;
    0 does not stream, which is faster, and loses what a dying instance had not answered. `seed`: of
    the dice that verify drafts. `lengths`: what is known of prompts from earlier runs, and learns
    from this one. `borrower`: the trainer, if it shares the instances' GPUs. `keeper`: of
    the store in which all is before it is handed out. `rewards`: what samples are worth, and which
    groups are kept for that.

    `open_samples`: asked for in groups that are here, queued or running.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        stream_every: int = 0,
        seed: int = 0,
        lengths: LengthStore | None = None,
        borrower: Borrower | None = None,
        keeper: StoreKeeper | None = None,
        rewards: RewardFunction | None = None,
    ) -> None:
        self.driver = driver
        self._keeper = keeper
        self._shares_gpus = borrower is not None
        if borrower is not None:
            driver.lending.on_lent, driver.lending.on_reclaimed = borrower.lent, borrower.reclaimed
        self.stream_every = stream_every
        leniency = driver.view.leniency
        self._test = None if leniency is None else DraftTest(leniency, seed)
        self._lengths = lengths
        self.open_samples = 0
        self._prompts: dict[str, Prompt] = {}
        self._rewards: RewardBook | None = None
        if rewards is not None:
            self._rewards = RewardBook(rewards, self._prompts, keeper)
            driver.judge_by(self._rewards)
        self._lost: list[LostGroup] = []  # that the trainer has not been told of
        self._batches = BatchDelivery(
            self._request, None if keeper is None else keeper.acknowledged
        )
        self._fleet_changed = asyncio.Event()
        driver.payloads.on_deliver = self._deliver
        driver.payloads.on_group_failed = self._fail
        driver.payloads.on_group_filtered = self._filter
        driver.on_broken = self._check_end
        driver.pump.watch(self._fleet_event, *_FLEET_EVENTS)

    @property
    def version(self) -> int:
        """The newest version published."""
        return self.driver.view.run.version

    def submit(self, prompts: Iterable[Prompt], tool: Tool | None = None) -> None:
        """Queue groups. Raises CallerError at the first that cannot be; those before it stay.

        With a `tool` their samples are trajectories of several turns. One that is here already is
        no other: it may be submitted again by who does not know whether it has arrived.
        """
        if self._keeper is not None:
            self._keeper.check_room()
        for prompt in prompts:
            if self._keeper is not None and self._is_here(prompt):
                continue
            if prompt.uid in self._prompts:
                raise CallerError(
                    f"group {prompt.uid!r} is already here; give each group its own uid"
                )
            check_prompt(
                prompt,
                max_model_len=self.driver.max_model_len(),
                turns=tool is not None,
                verified=self._test is not None,
            )
            self._prompts[prompt.uid] = prompt

            def payload(index: int, prompt: Prompt = prompt) -> TokenPayload:
                return self.payload(prompt, index, tool)

            try:
                self.driver.submit_group(self._submitted(prompt), payload)
            except BaseException:
                del self._prompts[prompt.uid]
                raise
            self.open_samples += prompt.samples
            if self._keeper is not None:
                self._keeper.submitted(prompt, tool=tool is not None)

    def _is_here(self, prompt: Prompt) -> bool:
        """The same prompt, or one that was delivered and is not acknowledged."""
        known = self._prompts.get(prompt.uid)
        return known == prompt if known is not None else prompt.uid in self._batches.made

    async def durable(self) -> None:
        """Until all that has happened is in the store, as durable as it makes things. Raises
        StoreBroken."""
        if self._keeper is not None:
            await self._keeper.promise()

    def restore(self, found: Recovered, payloads: RestoredPayloads) -> None:
        """Go on from what an earlier run has left. To be called before the scheduler is."""
        assert found.state is not None
        run, batches = found.state.run, payloads.batches()
        asked = bool(run.trainer_waiting or batches)
        self._batches.restore(batches, run.takes_parts if asked else None)
        self._lost = list(found.lost)
        if self._rewards is not None:
            self._rewards.take_up(found.rewards)
        for group in found.state.groups:
            prompt = found.prompts[group.group]
            self._prompts[prompt.uid] = prompt
            self.open_samples += prompt.samples
            self.driver.payloads.add_group(prompt.uid, payloads.factory(prompt))

    def unknown(self, uids: Iterable[str]) -> list[str]:
        """Of these groups those that are not here, nor in a batch that is not acknowledged."""
        known = {group.uid for group in self._lost} | self._batches.uids | self._prompts.keys()
        return [uid for uid in uids if uid not in known]

    def _submitted(self, prompt: Prompt) -> GroupSubmitted:
        submitted = prompt.submitted
        if self._rewards is not None:
            submitted = msgspec.structs.replace(submitted, judged=True)
        return submitted if self._lengths is None else self._lengths.complete(submitted)

    def payload(self, prompt: Prompt, index: int, tool: Tool | None = None) -> TokenPayload:
        """A sample of a prompt, before its first token."""
        sampling, stream_every = prompt.sampling_of(index), self.stream_every
        if tool is None:
            return TokenPayload(
                prompt.prompt_ids, sampling, stream_every=stream_every, test=self._test
            )
        return TrajectoryPayload(
            prompt.uid,
            index,
            prompt.prompt_ids,
            sampling,
            tool,
            self.driver.max_model_len,
            stream_every=stream_every,
            extra=prompt.extra,
            test=self._test,
        )

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
        part: int | None = None,
        parts: bool = False,
    ) -> Batch | None:
        """The batch after `acknowledged`, its number; None when submissions are closed and nothing
        is left.

        With `parts` what of it is whole, where the policy delivers in parts: it is asked for again
        until a part is the last. `part` says that of the batch `acknowledged` only the parts up to
        this one have arrived; what follows is the rest of it.

        Until it is acknowledged the same one comes again, so one that got lost on its way, or a
        wait that is cancelled, is no loss. Raises NotYet after `timeout_s` seconds.
        """
        try:
            return await self._batches.next(acknowledged, timeout_s, part=part, parts=parts)
        finally:
            if acknowledged is not None:
                await self.durable()  # it counts from when it is answered

    def close(self) -> None:
        """Nobody waits for a batch any more: whoever does, or asks for one, is told NotYet."""
        self._batches.close()

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
        if self._keeper is not None and said is None:
            raise CallerError(
                "a coroutine cannot be stored, and weights must outlive this process; give "
                "Reload(path), Transfer(...) or Applied(), or run without a store"
            )
        self.driver.publish(version, apply)
        if self._keeper is not None and said is not None:
            self._keeper.published(version, said)
            await self.durable()
        while wait and not self.has_loaded(version):
            self._fleet_changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._fleet_changed.wait()
            if self.driver.broken is not None:
                raise self.driver.broken

    def has_loaded(self, version: int) -> bool:
        """Whether every instance that is here, and at least one, has loaded `version` or a newer
        one.

        The core counts one without work as new once its update has begun, for it makes nothing
        with what it has; who wants to take the weights away again must know that it is over.
        """
        here = self.driver.view.instances
        return bool(here) and all(
            instance.version >= version and instance.status in _LOADED for instance in here
        )

    # -- what the driver says --------------------------------------------------------------

    def _request(self, parts: bool) -> None:
        self._check_end()
        if self._batches.awaited:
            self.driver.tell(BatchRequested(parts, shares_gpus=parts and self._shares_gpus))

    def _deliver(self, action: Deliver, payloads: list[Any]) -> None:
        samples = [
            sample_of(counted, payload, self._prompts[counted.group], self._reward(counted.request))
            for counted, payload in zip(action.samples, payloads, strict=True)
        ]
        if self._lengths is not None:
            self._learn(action, self._lengths)
        for uid in {sample.uid for sample in samples}:
            self.open_samples -= self._prompts.pop(uid).samples
        lost = self._take_lost()
        batch = batch_of(action, samples, lost)
        if self._keeper is None:
            self._batches.deliver(batch)
            return
        for group in lost:
            self._keeper.lost(group, batch.number)
        self._batches.expect(batch)
        handing_over = asyncio.ensure_future(self._keeper.promise())
        handing_over.add_done_callback(partial(self._hand_over, batch))

    def _hand_over(self, batch: Batch, promise: asyncio.Future[None]) -> None:
        """It is in the store, and will be delivered again until it is acknowledged."""
        if promise.cancelled() or promise.exception() is not None:
            return  # the driver is broken then, and says so
        self._batches.deliver(batch)
        self._check_end()

    def _reward(self, request: str) -> Reward | None:
        return None if self._rewards is None else self._rewards.take(request)

    def _learn(self, action: Deliver, lengths: LengthStore) -> None:
        by_group: dict[str, list[int]] = {}
        for sample in action.samples:
            by_group.setdefault(sample.group, []).append(sample.response_tokens)
        for group, made in by_group.items():
            lengths.delivered(self._prompts[group].submitted, made)

    def _fail(self, group: str, error: Exception | None) -> None:
        self._lose(LostGroup(group, _why(error)))

    def _filter(self, group: str) -> None:
        self._lose(LostGroup(group, None))

    def _lose(self, lost: LostGroup) -> None:
        if lost.uid in self._prompts:
            self.open_samples -= self._prompts.pop(lost.uid).samples
        self._lost.append(lost)
        if self._keeper is not None:
            self._keeper.lost(lost)
        self._check_end()

    def untold_failures(self) -> dict[str, str]:
        """Groups that the next batch will say have failed, and why."""
        return {group.uid: group.reason for group in self._lost if group.reason is not None}

    def _take_lost(self) -> list[LostGroup]:
        lost, self._lost = self._lost, []
        return lost

    def _fleet_event(self, event: Event) -> None:
        self._fleet_changed.set()

    def _check_end(self) -> None:
        """Whoever waits for a batch is told that none will come."""
        if not self._batches.awaited:
            return
        if self.driver.broken is not None:
            self._batches.fail(self.driver.broken)
        elif self._batches.expected:
            return
        elif self.driver.view.run.closed and not self._prompts and not self._batches.begun:
            run, lost = self.driver.view.run, self._take_lost()
            last = Deliver(run.batches, self.version, (), missing=run.lacking)
            self._batches.deliver(batch_of(last, [], lost) if lost else None)


def _why(error: Exception | None) -> str:
    """The reason of a group that has failed, from the last error in it."""
    if error is None:  # it was not an error that ended it (see `core.event_handlers.interrupted`)
        return "instances aborted it again and again, which nobody here has asked for"
    return str(error) if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}"
