"""The requests of a front's clients, under one scheduler.

To the next scheduler, or the same one over another connection, a request is submitted again under a
new id with the segments that it has, once no attempt of it is running: a running attempt is stopped
first, and its tokens are kept. Groups are not announced: their host has every token that was
reported, and a store keeps them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rollout_sched.core.model.actions import Answer, Discard, Dispatch
from rollout_sched.core.model.events import (
    OfAttempt,
    RequestFailed,
    RequestFinished,
    RequestSubmitted,
    RequestWithdrawn,
    Spans,
    TokensArrived,
)
from rollout_sched.core.model.records import DeliveredSample, Segment
from rollout_sched.link.protocol import InstanceVersion, RejectRequest
from rollout_sched.link.remote_link import RemoteLink
from rollout_sched.live import Front
from rollout_sched.live.ports import Payload, RequestRejected

# ------------------------------------------------------------------------------------------
# A request of a front's client, from submission to end, across changes of the scheduler.


class _Attempt(msgspec.Struct):
    """`version`: of its instance when it was ordered; `most`: most tokens that it may make."""

    instance: str
    version: int
    most: int
    tokens: int = 0
    spans: Spans = ()

    def segments(self) -> list[Segment]:
        """The tokens of this attempt by version, in the form of the scheduler's ledger
        (`core.work.attempts`)."""
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
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the tokens in its transcript."""
        now = [segment for one in self._attempts.values() for segment in one.segments()]
        return (*self._before, *now)

    def begun(self, dispatch: Dispatch, version: int) -> None:
        attempt = _Attempt(dispatch.instance, version, dispatch.max_new_tokens)
        self._attempts[dispatch.attempt] = attempt

    def reported(self, event: OfAttempt) -> None:
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
        made, asked = self.segments, self.submitted
        tokens = sum(segment.tokens for segment in made)
        if not self._ends and tokens < asked.max_tokens:
            return None
        finish = "stop" if self._ends else "length"
        prompt = asked.prompt_tokens
        return DeliveredSample(asked.request, asked.group, 0, prompt, tokens, made, 0, finish)

    def resubmission(self, request: str) -> RequestSubmitted:
        """The submission to another scheduler, under the id `request`."""
        if not (self.payload.resumable or self._ends):
            for attempt in self._attempts:
                self.payload.transcript.drop(attempt)
            self._attempts.clear()
        self._before = self.segments
        self._attempts.clear()
        self.payload.transcript.detach()
        self.submitted = msgspec.structs.replace(
            self.submitted, request=request, prior_segments=self._before, ends=self._ends
        )
        return self.submitted


class ClientCalls:
    """The requests by id, from submission until they end or another scheduler takes them over.

    prefix   of their ids
    on_over  called with each request that has ended
    """

    def __init__(
        self,
        prefix: str,
        front: Front,
        link: RemoteLink,
        on_over: Callable[[ClientCall], None],
    ) -> None:
        self._prefix = prefix
        self._payloads = front.payloads
        self._endings = front.endings
        self._link = link
        self._on_over = on_over
        self._calls: dict[str, ClientCall] = {}
        self._made = 0
        self._alone = False  # the scheduler is gone
        self._versions: dict[str, int] = {}  # of instances, as the scheduler knows them

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, request: str) -> ClientCall:
        return self._calls[request]

    def every(self) -> list[ClientCall]:
        """In the order of submission."""
        return list(self._calls.values())

    # -- from clients ----------------------------------------------------------------------

    def submit(
        self,
        payload: Payload,
        prompt_tokens: int,
        max_tokens: int,
        group: str = "",
        session: str = "",
        priority: int = 0,
        client: str = "",
    ) -> str:
        """Submit a request and return its id. A refusal by the scheduler is reported to the
        responder."""
        if self._link.broken is not None:
            raise self._link.broken
        request = self._new_id()
        submitted = RequestSubmitted(
            request,
            group or request,
            prompt_tokens,
            max_tokens,
            session,
            priority,
            resumable=payload.resumable,
            client=client,
        )
        self._take_in(ClientCall(payload, submitted))
        return request

    def withdraw(self, request: str) -> None:
        """The client of a submitted request has gone."""
        call = self._calls.get(request)
        if call is None:
            return
        call.withdrawn = True
        if self._alone:
            self._end_withdrawn(request)
        else:
            self._link.tell(RequestWithdrawn(request))

    # -- from one scheduler to the next ----------------------------------------------------

    def lose_scheduler(self) -> None:
        """From now on the front answers a complete response itself. A withdrawn request ends now:
        the old scheduler may not know of the withdrawal, and the next one need not."""
        self._alone = True
        for call in self.every():
            if call.withdrawn:
                self._end_withdrawn(call.submitted.request)
            else:
                self._answer_if_whole(call)

    def transfer(self, call: ClientCall, take_over: Callable[[ClientCall], None]) -> None:
        """No attempt of the request runs any more: hand it over, unless it has ended meanwhile."""
        request = call.submitted.request
        if self._calls.pop(request, None) is not None:
            self._payloads.forget(request)
            take_over(call)

    def take_over(self, call: ClientCall) -> None:
        """Take a request of a scheduler that is gone; it continues from the tokens it has."""
        call.resubmission(self._new_id())
        self._take_in(call)

    # -- what the scheduler orders, and is told --------------------------------------------

    def serves(self, order: InstanceVersion) -> None:
        self._versions[order.instance] = order.version

    def departed(self, instance: str) -> None:
        self._versions.pop(instance, None)

    def begun(self, order: Dispatch) -> None:
        call = self._calls.get(order.request)
        if call is not None:
            call.begun(order, self._versions.get(order.instance, order.salt))

    def reported(self, event: OfAttempt) -> None:
        call = self._calls.get(event.request)
        if call is None:
            return
        call.reported(event)
        if self._alone and isinstance(event, RequestFinished):
            self._answer_if_whole(call)

    def discarded(self, order: Discard) -> None:
        call = self._calls.get(order.request)
        if call is not None:
            call.discarded(order.attempt)
        if order.ends:
            self._over(order.request)

    def answer(self, order: Answer) -> None:
        if order.sample.request in self._calls:
            self._over(order.sample.request)
            self._endings.answer(order)

    def refuse(self, order: RejectRequest) -> None:
        payload = self._payloads.get(order.request)
        if payload is not None:
            self._over(order.request)
            self._payloads.forget(order.request)
            error = RequestRejected(order.reason)
            self._link.defer(payload.responder.fail, "failed", error)

    # -- small things ----------------------------------------------------------------------

    def _new_id(self) -> str:
        self._made += 1
        return f"{self._prefix}.{self._made}"

    def _take_in(self, call: ClientCall) -> None:
        request = call.submitted.request
        self._calls[request] = call
        self._payloads.add(request, call.payload)
        self._link.tell(call.submitted)

    def _over(self, request: str) -> None:
        call = self._calls.pop(request, None)
        if call is not None:
            self._on_over(call)

    def _end_withdrawn(self, request: str) -> None:
        self._over(request)
        self._endings.discard(Discard(request, 0, "withdrawn", ends=True))
        self._link.settle()

    def _answer_if_whole(self, call: ClientCall) -> None:
        sample = call.whole()
        if sample is not None:
            self.answer(Answer(sample))
            self._link.settle()
