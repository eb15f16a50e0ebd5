"""Connects verl's agent loops to a scheduler: submits groups and returns the samples of batches.

All of verl's workers share one coordinator, which runs as its own actor (see `manager`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from rollout_sched.client import Batch, Prompt, RolloutScheduler, Sample
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.verl.groups import GroupFailed

log = logging.getLogger(__name__)


class Coordinator:
    """Submits the groups of verl's workers and hands out the samples of delivered batches.

    rollouts         the scheduler; already open
    tags             reads the keys and tags of the training partition from TransferQueue
    groups_per_step  groups that a step of verl's trainer takes
    poll_s           seconds between two reads of the tags
    """

    def __init__(
        self,
        rollouts: RolloutScheduler,
        tags: Callable[[], Awaitable[Tags]],
        groups_per_step: int,
        poll_s: float,
    ) -> None:
        self._rollouts = rollouts
        self._tags = tags
        self._groups_per_step = groups_per_step
        self._poll_s = poll_s
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
            if await self._rollouts.submit([prompt]):
                raise GroupFailed(f"group {prompt.uid}: its samples were delivered before")
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
            await asyncio.sleep(self._poll_s)

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


# ------------------------------------------------------------------------------------------
# Decides from TransferQueue when verl's trainer needs its next batch: the trainer never asks.

#: Tags of the keys of one partition: a group's key is its uid, a sample's `{uid}_{session}_{i}`.
Tags = Mapping[str, Mapping[str, Any]]

_SETTLED = ("finished", "failure")


def asks_for_more(tags: Tags, given: Collection[str], groups: int) -> bool:
    """Whether the trainer has fewer than `groups` groups, including those that it trains on now.

    given  groups that were delivered, whose sessions may still process their samples

    A step of verl's trainers takes `groups` groups. The trainer clears their samples after it has
    published its weights (`trainer_base.fit`), and then waits for the next ones. At this moment the
    next batch is requested, and the groups that the last one lost (stale, failed, or without a
    training signal) are replaced.
    """
    held = {uid for uid in given if uid in tags}
    running = set()
    for key, tag in tags.items():
        if not tag.get("is_prompt"):
            continue
        if tag.get("status") in _SETTLED:
            held.add(key)
        else:
            running.add(key)
    for key, tag in tags.items():
        uid = key.split("_")[0]  # as verl's ReplayBuffer splits keys
        if not tag.get("is_prompt") and not tag.get("is_padding") and uid not in running:
            held.add(uid)  # taken by the trainer, which has cleared the group's own key
    return len(held) < groups


def still_given(tags: Tags, given: Collection[str]) -> set[str]:
    """The delivered groups that are not yet finished or failed in TransferQueue."""
    return {uid for uid in given if uid in tags and tags[uid].get("status") not in _SETTLED}
