"""Trajectories: responses of several turns, with a call of the caller's tool between two turns.

The scheduler sees each turn as an attempt of one request, so batching, interruption and staleness
apply to agents as to any other rollout. A trajectory holds no slot while its tool runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import msgspec

from rollout_sched.core.actions import Dispatch
from rollout_sched.live.draft_test import DraftTest
from rollout_sched.live.payloads import TokenPayload
from rollout_sched.live.ports import InstanceClient, Outcome


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

    `max_model_len` returns how many tokens of context the fleet's instances accept (0: unknown); a
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
        test: DraftTest | None = None,
    ) -> None:
        super().__init__(prompt_ids, sampling, stream_every=stream_every, test=test)
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
