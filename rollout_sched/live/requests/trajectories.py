"""Trajectories: responses of several turns, with a call of the caller's tool between two turns.

The scheduler sees each turn as an attempt of one request, so batching, interruption and staleness
apply to agents as to any other rollout. A trajectory holds no slot while its tool runs.

A tool's observation is in the transcript between two pieces, counted as context and not as
response. When a trajectory is thrown away its tool is cancelled, so a late result goes nowhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal, cast

import msgspec

from rollout_sched.core.model.actions import Discard, Dispatch
from rollout_sched.core.model.events import ToolReturned, TrajectoryEnded
from rollout_sched.live.ports import InstanceClient, Outcome, Payload, ToolPayload
from rollout_sched.live.requests.link import SchedulerLink
from rollout_sched.live.requests.payloads import Payloads
from rollout_sched.live.requests.token_payload import TokenPayload

log = logging.getLogger(__name__)


class Trajectory(msgspec.Struct, frozen=True):
    """A trajectory whose turn is over, as its tool gets it.

    uid, index     the prompt, and the sample within its group
    response_ids   all turns so far, and what the tool returned for the earlier ones
    response_mask  1 for each of `response_ids` that was generated, 0 for what a tool returned
    turn           how many turns are over, including this one
    turn_ids       the tokens of the turn that is over
    extra          of its prompt
    """

    uid: str
    index: int
    prompt_ids: Sequence[int]
    response_ids: list[int]
    response_mask: list[int]
    turn: int
    turn_ids: list[int]
    extra: dict[str, Any]


#: Handles a turn, and returns the tokens that follow it (its result, in the chat template of the
#: model, up to where the model continues); None if no turn follows.
#:
#: An error fails the trajectory's group. There is no timeout: the tool sets its own. The call is
#: cancelled when the trajectory is discarded, as stale or surplus. A trajectory that starts over
#: has the same `uid` and `index`, at turn 1 again.
Tool = Callable[[Trajectory], Awaitable[Sequence[int] | None]]


class TrajectoryPayload(TokenPayload):
    """A prompt whose turns a tool answers.

    `max_model_len` returns how many tokens of context some instance takes (0: unknown); a
    trajectory that reaches it ends with "length".
    """

    def __init__(
        self,
        uid: str,
        index: int,
        prompt_ids: Sequence[int],
        sampling: dict[str, Any],
        tool: Tool,
        max_model_len: Callable[[], int],
        *,
        stream_every: int = 0,
        extra: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(prompt_ids, sampling, stream_every=stream_every)
        self._uid = uid
        self._index = index
        self._tool = tool
        self._max_model_len = max_model_len
        self._extra = extra or {}

    async def attempt(self, client: InstanceClient, dispatch: Dispatch, order_id: str) -> Outcome:
        room = self._room()
        if room is not None and room < dispatch.max_new_tokens:
            dispatch = msgspec.structs.replace(dispatch, max_new_tokens=max(1, room))
        outcome = await super().attempt(client, dispatch, order_id)
        if outcome.finish == "stop":
            outcome.finish = "turn"
        return outcome

    async def act(self) -> Sequence[int] | Literal["stop", "length"]:
        joined = self.transcript.joined
        returned = await self._tool(
            Trajectory(
                self._uid,
                self._index,
                self.prompt_ids,
                joined.token_ids,
                joined.mask,
                joined.turns + 1,
                joined.turn_ids,
                self._extra,
            )
        )
        if returned is None:
            return "stop"
        token_ids = [int(token) for token in returned]
        room = self._room()
        return token_ids if room is None or len(token_ids) < room else "length"

    def observe(self, attempt: int, token_ids: Sequence[int]) -> None:
        self.transcript.observe(attempt, token_ids)

    def _room(self) -> int | None:
        """Tokens that the context may still grow by; None if that is unknown."""
        most = self._max_model_len()
        return most - len(self.prompt_ids) - len(self.response_ids) if most else None


class ToolCalls:
    """Runs a coroutine for each trajectory whose turn is over: its tool. The result is reported to
    the scheduler. If a trajectory is discarded or starts over, its tool call is cancelled."""

    def __init__(self, link: SchedulerLink, payloads: Payloads) -> None:
        self._link = link
        self._payloads = payloads
        self._calls: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def expect(self, dispatch: Dispatch, payload: Payload) -> None:
        """The turn of this attempt is over; call its tool after the scheduler was told, unless the
        turn was the last."""
        self._link.when_acting(dispatch, partial(self._begin, dispatch, cast(ToolPayload, payload)))

    def restore(self, dispatch: Dispatch) -> None:
        """The turn of this attempt was over when an earlier run ended, and the tool call was lost
        with that run: call the tool again."""
        self._begin(dispatch, cast(ToolPayload, self._payloads.payload_of(dispatch)))

    def _begin(self, dispatch: Dispatch, payload: ToolPayload) -> None:
        call = asyncio.get_running_loop().create_task(self._call(dispatch, payload))
        self._calls[dispatch.request] = call

    async def _call(self, dispatch: Dispatch, payload: ToolPayload) -> None:
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
