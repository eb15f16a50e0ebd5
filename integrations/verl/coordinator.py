"""Connects verl's agent loops to a scheduler: submits groups and returns the samples of batches.

All of verl's workers share one coordinator, which runs as its own actor (see `manager`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rollout_sched.client import Batch, Prompt, RolloutScheduler, Sample
from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.verl.groups import GroupFailed
from rollout_sched.integrations.verl.pacing import Tags, asks_for_more, still_given

log = logging.getLogger(__name__)


class Coordinator:
    """Submits the groups of verl's workers and hands out the samples of delivered batches.

    rollouts         the scheduler; already open
    tags             reads the keys and tags of the training partition from TransferQueue
    groups_per_step  groups that a step of verl's trainer takes
    look_s           seconds between two reads of the tags
    """

    def __init__(
        self,
        rollouts: RolloutScheduler,
        tags: Callable[[], Awaitable[Tags]],
        groups_per_step: int,
        look_s: float,
    ) -> None:
        self._rollouts = rollouts
        self._tags = tags
        self._groups_per_step = groups_per_step
        self._look_s = look_s
        self._waiting: dict[str, asyncio.Future[list[Sample]]] = {}
        self._given: set[str] = set()
        self._broken: Exception | None = None
        self._delivering = asyncio.get_running_loop().create_task(self._deliver_batches())

    async def samples(self, prompt: Prompt) -> list[Sample]:
        """The samples of a group, once its batch is delivered, in the order of their indices.

        Raises CallerError if the group cannot be submitted, GroupFailed if it can never be
        complete, and the error that ended the deliveries if they have ended.
        """
        self.check()
        if prompt.uid in self._waiting:
            raise CallerError(f"group {prompt.uid} is already submitted and not yet delivered")
        waited_for: asyncio.Future[list[Sample]] = asyncio.get_running_loop().create_future()
        self._waiting[prompt.uid] = waited_for
        try:
            await self._rollouts.submit([prompt])
            return await waited_for
        finally:
            self._waiting.pop(prompt.uid, None)

    def check(self) -> None:
        """Raises the error that ended the deliveries, if they have ended."""
        if self._broken is not None:
            raise self._broken

    async def close(self) -> None:
        """Stop the deliveries. The scheduler stays open; its owner closes it."""
        self._delivering.cancel()
        await asyncio.gather(self._delivering, return_exceptions=True)

    async def _deliver_batches(self) -> None:
        try:
            while True:
                await self._until_asked_for()
                part = await self._rollouts.next_batch(parts=True)
                while part is not None and not part.last:
                    self._hand_out(part)
                    part = await self._rollouts.next_batch(parts=True)
                if part is None:
                    raise CallerError("the submissions were closed by another client")
                self._hand_out(part)
        except Exception as error:  # the waiting callers must get the error
            log.exception("delivery of batches has stopped")
            self._fail_all(error)

    async def _until_asked_for(self) -> None:
        while True:
            tags = await self._tags()
            self._given = still_given(tags, self._given)
            if asks_for_more(tags, self._given, self._groups_per_step):
                return
            await asyncio.sleep(self._look_s)

    def _hand_out(self, batch: Batch) -> None:
        for failed in batch.failed:
            self._settle(failed.uid, GroupFailed(f"group {failed.uid}: {failed.reason}"))
        for uid, samples in batch.groups().items():
            self._given.add(uid)
            self._settle(uid, sorted(samples, key=lambda sample: sample.index))

    def _settle(self, uid: str, outcome: list[Sample] | Exception) -> None:
        waited_for = self._waiting.get(uid)
        if waited_for is None or waited_for.done():
            log.warning("no agent loop waits for group %s", uid)
        elif isinstance(outcome, Exception):
            waited_for.set_exception(outcome)
        else:
            waited_for.set_result(outcome)

    def _fail_all(self, error: Exception) -> None:
        self._broken = error
        for waited_for in self._waiting.values():
            if not waited_for.done():
                waited_for.set_exception(error)
