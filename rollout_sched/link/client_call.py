"""A request of a front's client, from submission to end, across changes of the scheduler."""

from __future__ import annotations

import msgspec

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.events import (
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    Spans,
    TokensArrived,
)
from rollout_sched.core.samples import DeliveredSample, Segment
from rollout_sched.live.ports import Payload

#: Events that report the progress of an attempt of a client's request.
OfAttempt = TokensArrived | RequestFinished | RequestInterrupted | RequestFailed


class _Attempt(msgspec.Struct):
    """`version`: of its instance when it was ordered; `most`: most tokens that it may make."""

    instance: str
    version: int
    most: int
    tokens: int = 0
    spans: Spans = ()

    def segments(self) -> list[Segment]:
        """As the scheduler's book has them (`core.attempts`)."""
        if not self.tokens:
            return []
        if sum(tokens for _, tokens in self.spans) != self.tokens:
            return [Segment(self.version, self.tokens, self.instance)]
        return [Segment(version, tokens, self.instance) for version, tokens in self.spans if tokens]


class ClientCall:
    """What the front knows of the request, so that another scheduler can continue it.

    `name`: the name used on the client's side; `submitted`: the submission to the current
    scheduler; `withdrawn`: the client has gone, which the scheduler may not know yet.
    """

    __slots__ = ("_attempts", "_before", "_ends", "name", "payload", "submitted", "withdrawn")

    def __init__(self, payload: Payload, submitted: RequestSubmitted) -> None:
        self.name = submitted.request
        self.payload = payload
        self.submitted = submitted
        self.withdrawn = False
        self._before: tuple[Segment, ...] = ()
        self._attempts: dict[int, _Attempt] = {}
        self._ends = False  # by a stop; at a token limit the scheduler decides whether it continues

    @property
    def made(self) -> tuple[Segment, ...]:
        """The segments of the tokens in its transcript."""
        now = [segment for one in self._attempts.values() for segment in one.segments()]
        return (*self._before, *now)

    def begun(self, dispatch: Dispatch, version: int) -> None:
        attempt = _Attempt(dispatch.instance, version, dispatch.max_new_tokens)
        self._attempts[dispatch.attempt] = attempt

    def told(self, event: OfAttempt) -> None:
        """Note an event that is reported to the scheduler about one of its attempts."""
        attempt = self._attempts.get(event.attempt)
        if attempt is None:
            return
        if not isinstance(event, RequestFailed):
            attempt.tokens = min(max(0, event.tokens), attempt.most)
            if not isinstance(event, TokensArrived):
                attempt.spans = event.spans
            self._ends = isinstance(event, RequestFinished) and event.reason == "stop"
        elif not event.usable:
            del self._attempts[event.attempt]

    def discarded(self, attempt: int) -> None:
        """The tokens of that attempt are discarded; 0: all tokens."""
        self._ends = False
        if attempt:
            self._attempts.pop(attempt, None)
        else:
            self._before = ()
            self._attempts.clear()

    def whole(self) -> DeliveredSample | None:
        """The response if it is certainly complete; None if it may continue."""
        made, asked = self.made, self.submitted
        tokens = sum(segment.tokens for segment in made)
        if not self._ends and tokens < asked.max_tokens:
            return None
        finish = "stop" if self._ends else "length"
        prompt = asked.prompt_tokens
        return DeliveredSample(asked.request, asked.group, 0, prompt, tokens, made, 0, finish)

    def anew(self, request: str) -> RequestSubmitted:
        """The submission to another scheduler, under the id `request`."""
        self._before = self.made
        self._attempts.clear()
        self.payload.transcript.detach()
        self.submitted = msgspec.structs.replace(
            self.submitted, request=request, made=self._before, ends=self._ends
        )
        return self.submitted
