"""Judges finished samples and complete groups: the reward of each, and whether a group is kept.

A sample is judged as soon as it has finished, a group when the scheduler asks and all its samples
are judged. Neither holds a slot on an instance.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, get_args

from rollout_sched.core.model.actions import Deliver, Discard, Dispatch, Judge
from rollout_sched.core.model.events import Ending, GroupJudged, Restored
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.core.model.request_ids import request_id
from rollout_sched.live.event_pump import EventPump
from rollout_sched.live.ports import SampleJudge
from rollout_sched.live.requests.payloads import Payloads

log = logging.getLogger(__name__)


class Judging:
    """Runs one coroutine for each sample that is judged, and one for each group.

    A sample's reward is kept until the sample is delivered. If its request continues or is
    discarded, its judgement is cancelled and forgotten.
    """

    def __init__(self, pump: EventPump, payloads: Payloads, judge: SampleJudge) -> None:
        self._judge = judge
        self._pump = pump
        self._payloads = payloads
        self._view = pump.scheduler.view
        self._samples: dict[str, asyncio.Task[None]] = {}  # by request
        self._groups: dict[str, asyncio.Task[None]] = {}
        pump.before(Dispatch, self._go_on)
        pump.before(Deliver, self._deliver)
        pump.before(Discard, self._discard)
        pump.watch(self._look, *get_args(Ending))
        pump.watch(self._look_at_all, Restored)

    def __len__(self) -> int:
        """Number of running coroutines."""
        calls = [*self._samples.values(), *self._groups.values()]
        return sum(not call.done() for call in calls)

    # -- what happens ----------------------------------------------------------------------

    def _look(self, event: Ending) -> None:
        """Judge the sample if the event has finished its request."""
        sample = self._view.to_judge(event.request)
        if sample is not None:
            self._begin(sample)

    def _look_at_all(self, event: Restored) -> None:
        """Judge samples that finished in an earlier epoch of the run and were not judged in it."""
        for group in event.state.groups:
            waits = group.judged and group.state != "complete"
            for request in group.requests if waits else ():
                sample = self._view.to_judge(request_id(group.group, request.index))
                if sample is not None:
                    self._begin(sample)

    def _go_on(self, action: Dispatch) -> None:
        """The request continues: its reward is no longer valid."""
        self._forget(action.request)

    def _discard(self, action: Discard) -> None:
        if not action.attempt:
            self._forget(action.request)
            group = self._groups.pop(action.group, None)
            if group is not None:
                group.cancel()

    def _deliver(self, action: Deliver) -> None:
        for sample in action.samples:
            self._samples.pop(sample.request, None)

    def settle(self, action: Judge) -> None:
        """Decide whether a group is trained, once all its samples are judged."""
        calls = [self._begin(sample) for sample in action.samples]
        self._groups[action.group] = _task(self._settle(action, calls))

    def cancel_all(self) -> None:
        """Cancel all without reporting it."""
        for call in [*self._groups.values(), *self._samples.values()]:
            call.cancel()
        self._groups.clear()
        self._samples.clear()

    # -- samples and groups ----------------------------------------------------------------

    def _begin(self, sample: DeliveredSample) -> asyncio.Task[None]:
        call = self._samples.get(sample.request)
        if call is None:
            call = self._samples[sample.request] = _task(self._judge_one(sample))
        return call

    async def _judge_one(self, sample: DeliveredSample) -> None:
        worth = await self._judge.judge(sample, self._payloads.payload_of)
        if self._samples.get(sample.request) is asyncio.current_task():
            self._judge.note(sample, worth)  # else this task ran on after it was cancelled

    def _forget(self, request: str) -> None:
        call = self._samples.pop(request, None)
        if call is not None:
            call.cancel()
        self._judge.forget(request)  # it may know the request from an earlier epoch of the run

    async def _settle(self, action: Judge, calls: Sequence[asyncio.Task[None]]) -> None:
        try:
            await asyncio.gather(*calls)
            kept = await self._judge.keeps(action.samples, self._payloads.payload_of)
        except Exception as error:  # the caller's own
            log.exception("group %s could not be judged", action.group)
            self._payloads.note_group_error(action.group, error)
            event = GroupJudged(action.group, action.judgement, "failed")
        else:
            event = GroupJudged(action.group, action.judgement, "kept" if kept else "filtered")
        if self._groups.get(action.group) is not asyncio.current_task():
            return  # this task ran on after it was cancelled
        del self._groups[action.group]
        if self._view.is_judged(action.group, action.judgement):
            self._pump.tell(event)


def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    call = asyncio.get_running_loop().create_task(work)
    call.add_done_callback(_heard)
    return call


def _heard(call: asyncio.Task[None]) -> None:
    """Mark the error as retrieved: it is raised where the task is awaited, if it is at all."""
    if not call.cancelled():
        call.exception()
