"""Runs the tools of trajectories, each between two turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import cast

from rollout_sched.core.actions import Discard, Dispatch
from rollout_sched.core.events import ToolReturned, TrajectoryEnded
from rollout_sched.live.payload_book import PayloadBook
from rollout_sched.live.ports import Acting, Payload
from rollout_sched.live.scheduler_link import SchedulerLink

log = logging.getLogger(__name__)


class ToolCalls:
    """One coroutine for each trajectory whose turn is over; its result is reported to the
    scheduler. If a trajectory is discarded or starts over, its tool call is cancelled."""

    def __init__(self, link: SchedulerLink, payloads: PayloadBook) -> None:
        self._link = link
        self._payloads = payloads
        self._calls: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def expect(self, dispatch: Dispatch, payload: Payload) -> None:
        """The turn of this attempt is over; call its tool after the scheduler was told, unless the
        turn was the last."""
        self._link.when_acting(dispatch, partial(self._begin, dispatch, cast(Acting, payload)))

    def take_up(self, dispatch: Dispatch) -> None:
        """The turn of this attempt was over when an earlier run ended, and the tool call was lost
        with that run: call the tool again."""
        self._begin(dispatch, cast(Acting, self._payloads.of(dispatch)))

    def _begin(self, dispatch: Dispatch, payload: Acting) -> None:
        call = asyncio.get_running_loop().create_task(self._call(dispatch, payload))
        self._calls[dispatch.request] = call

    async def _call(self, dispatch: Dispatch, payload: Acting) -> None:
        request, attempt = dispatch.request, dispatch.attempt
        event: ToolReturned | TrajectoryEnded
        try:
            returned = await payload.act()
            if isinstance(returned, str):
                event = TrajectoryEnded(request, attempt, returned)
            else:
                event = ToolReturned(request, attempt, len(returned))
        except Exception as error:  # the caller's own
            log.exception("the tool of request %s failed after turn %d", request, dispatch.turn + 1)
            self._payloads.note_error(dispatch, error)
            event = TrajectoryEnded(request, attempt, "failed")
        if self._calls.get(request) is not asyncio.current_task():
            return  # this task ran on after it was cancelled
        del self._calls[request]
        if isinstance(event, ToolReturned):
            payload.observe(attempt, cast(Sequence[int], returned))
        self._link.tell(event)

    def discard(self, action: Discard) -> None:
        """Cancel the tool call of a request whose tokens are all discarded."""
        call = None if action.attempt else self._calls.pop(action.request, None)
        if call is not None:
            call.cancel()

    def cancel_all(self) -> None:
        """Cancel all calls without reporting them."""
        for call in self._calls.values():
            call.cancel()
        self._calls.clear()
