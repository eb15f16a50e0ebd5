"""Simulated attempts: turn a Dispatch into a simulated request, and its end into an event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import (
    Event,
    RequestFinished,
    RequestInterrupted,
    ToolReturned,
    TurnFinished,
)
from rollout_sched.simulators.instance import Ended, SimRequest
from rollout_sched.simulators.replay.scenario import Conversation
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import SampleRecord


class SimAttempts:
    """The attempts in flight, and the names of the texts of requests between two attempts.

    A text is named by the number of the attempt that began it.

    asking  the direct requests that are not finished, with their conversations
    """

    __slots__ = ("_in_flight", "_streams", "_workload", "asking")

    def __init__(self, workload: Workload) -> None:
        self.asking: dict[str, Conversation] = {}
        self._workload = workload
        self._in_flight: dict[int, tuple[Dispatch, SampleRecord, int]] = {}
        self._streams: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._in_flight)

    def __contains__(self, attempt: int) -> bool:
        return attempt in self._in_flight

    def request_of(self, attempt: int) -> str:
        return self._in_flight[attempt][0].request

    def on(self, instance: str) -> list[int]:
        """The attempts in flight on an instance, in the order of their dispatch."""
        return [n for n, (sent, _, _) in self._in_flight.items() if sent.instance == instance]

    def begin(self, action: Dispatch) -> SimRequest:
        if not action.group:
            return self._begin_direct(action, self.asking[action.request])
        load, stream = self._workload, self._streams.pop(action.request, action.attempt)
        if action.computed_tokens:
            sample = load.sample(action.group, action.index)
        else:
            sample = load.begin(action.group, action.index)
            stream = action.attempt  # a new text starts here
        self._in_flight[action.attempt] = (action, sample, stream)
        made = action.response_tokens - _in_earlier_turns(action, sample)
        return SimRequest(
            action.attempt,
            action.context_tokens,
            sample.turns[action.turn].output_tokens - made,
            action.max_new_tokens,
            prompt_stream=action.group,
            shared_tokens=self._workload.prompt_tokens(action.group),
            stream=stream,
            known_tokens=action.computed_tokens,
            salt=action.salt,
        )

    def _begin_direct(self, action: Dispatch, conversation: Conversation) -> SimRequest:
        if not (conversation.turn or action.computed_tokens):
            conversation.stream = action.attempt  # a new text starts here
        sample = conversation.present
        self._in_flight[action.attempt] = (action, sample, conversation.stream)
        return SimRequest(
            action.attempt,
            action.context_tokens,
            sample.response_tokens - action.response_tokens,
            action.max_new_tokens,
            prompt_stream=conversation.prompt,
            shared_tokens=conversation.prompt_tokens,
            stream=conversation.stream,
            known_tokens=max(action.computed_tokens, conversation.known_tokens),
            salt=action.salt,
        )

    def end(self, ended: Ended) -> tuple[Event, tuple[float, ToolReturned] | None] | None:
        """The event for its end, and the tool that returns, with its delay in seconds. None if the
        attempt is not in flight any more."""
        found = self._in_flight.pop(ended.attempt, None)
        if found is None:
            return None
        dispatch, sample, stream = found
        request, tokens, spans, turns = dispatch.request, ended.tokens, ended.spans, sample.turns
        stopped = ended.reason == "stop"
        may_go_on = not stopped or len(turns) > 1
        if may_go_on and dispatch.group:
            self._streams[request] = stream
        if ended.reason == "abort":
            return RequestInterrupted(request, ended.attempt, tokens, spans), None
        made = dispatch.response_tokens + tokens
        last = dispatch.turn == len(turns) - 1 or made >= self._workload.max_tokens
        if stopped and not last:
            turn = turns[dispatch.turn]
            returned = ToolReturned(request, ended.attempt, turn.observation_tokens)
            return TurnFinished(request, ended.attempt, tokens, spans), (turn.tool_s, returned)
        # A sample that was recorded under a lower cap ends here. If the scheduler got "length" at
        # the end of a segment, it would continue the sample.
        over = made < self._workload.max_tokens and tokens == dispatch.max_new_tokens
        cut = ended.reason == "length" or (sample.finish == "length" and not over)
        reason: Literal["stop", "length"] = "length" if cut else "stop"
        return RequestFinished(request, ended.attempt, tokens, spans, reason), None

    def drop(self, attempts: Iterable[int]) -> None:
        """The attempts have failed: ignore whatever their instance still reports of them."""
        for attempt in attempts:
            dispatch, _, stream = self._in_flight.pop(attempt)
            if dispatch.group:
                self._streams[dispatch.request] = stream  # it may continue

    def forget(self, requests: Iterable[str]) -> None:
        """The requests will not continue."""
        if self._streams:
            for request in requests:
                self._streams.pop(request, None)


def _in_earlier_turns(dispatch: Dispatch, sample: SampleRecord) -> int:
    """Response tokens of the turns before this one."""
    if not dispatch.turn:
        return 0
    return sum([turn.output_tokens for turn in sample.turns[: dispatch.turn]])
