"""A front before a scheduler that is elsewhere: clients' requests, and groups that it was given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rollout_sched.core.actions import Answer, Discard, Dispatch
from rollout_sched.core.events import (
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    RequestWithdrawn,
    TokensArrived,
    ToolReturned,
    TurnFinished,
)
from rollout_sched.link.client_call import ClientCall, OfAttempt
from rollout_sched.link.frame_sequence import FrameSequence
from rollout_sched.link.group_pieces import GroupPieces
from rollout_sched.link.messages import (
    Act,
    BreakOff,
    Disbelieve,
    FleetChanged,
    GoesOn,
    LetGo,
    Lose,
    Refused,
    Relinquished,
    Report,
    Reports,
    Serves,
    TakeGroup,
    encode,
    read_orders,
)
from rollout_sched.link.outbox import Outbox
from rollout_sched.link.remote_link import Clients, RemoteLink
from rollout_sched.live.attempts import LiveAttempt
from rollout_sched.live.front import Front
from rollout_sched.live.payload_book import PayloadFactory
from rollout_sched.live.ports import Payload, RequestRejected
from rollout_sched.live.settings import Settings

#: Of these a piece may have been made, or a tool has returned to one.
_MAKES = (RequestFailed, RequestFinished, RequestInterrupted, TurnFinished, ToolReturned)


class RemoteFront:
    """One front, for one epoch of its scheduler. Make it inside a running event loop.

    name       unique among the fronts of the scheduler; begins the ids of its requests
    epoch      of the scheduler; frames of another are refused, and counted
    run_id     begins the names of orders to instances
    send       hands a frame to the link, which keeps their order
    make       what makes a group's payloads from its recipe
    on_broken  called once, with why, when this front cannot go on
    on_over    called with each request of a client that has ended

    calls      of its clients, by the ids of their requests
    """

    def __init__(
        self,
        name: str,
        epoch: str,
        run_id: str,
        *,
        send: Callable[[bytes], None],
        clients: Clients,
        make: Callable[[bytes], PayloadFactory],
        settings: Settings,
        on_broken: Callable[[Exception], None],
        on_over: Callable[[ClientCall], None] = lambda call: None,
    ) -> None:
        self.calls: dict[str, ClientCall] = {}
        self.max_model_len = 0
        self._left = False
        self._prefix = f"{run_id}.{name}"
        self._epoch = epoch
        self._sent = 0
        self._frames = FrameSequence(epoch)
        self._send = send
        self._make = make
        self._requests = 0
        self._on_over = on_over
        self._versions: dict[str, int] = {}  # of instances, as the scheduler knows them
        self._outbox: Outbox[Report] = Outbox(self._send_frame)
        self._link = RemoteLink(self._tell, clients, on_broken)
        self.front = Front(self._link, settings, run_id)
        self._pieces = GroupPieces(self.front.payloads)
        self._orders: dict[type[Any], Callable[[Any], None]] = {
            **self.front.orders,
            Serves: self._serves,
            Dispatch: self._dispatch,
            Answer: self._answer,
            Discard: self._discard,
            GoesOn: self._link.goes_on,
            Act: self._link.act,
            BreakOff: self._break_off,
            Disbelieve: self._disbelieve,
            Lose: self._lose,
            TakeGroup: self._take_group,
            LetGo: self._let_go,
            Refused: self._refuse,
            FleetChanged: self._fleet_changed,
        }

    @property
    def refused(self) -> int:
        """Frames of another epoch, or that had come before."""
        return self._frames.refused

    # -- its clients -----------------------------------------------------------------------

    def submit(
        self,
        payload: Payload,
        prompt_tokens: int,
        max_tokens: int,
        group: str = "",
        session: str = "",
        priority: int = 0,
    ) -> str:
        """As `Driver.submit`; what the scheduler refuses its responder hears of."""
        if self._link.broken is not None:
            raise self._link.broken
        request = self._new_id()
        submitted = RequestSubmitted(
            request, group or request, prompt_tokens, max_tokens, session, priority
        )
        self._take_in(ClientCall(payload, submitted))
        return request

    def take_over(self, call: ClientCall) -> None:
        """Of a scheduler that has gone: it goes on from what it has."""
        call.anew(self._new_id())
        self._take_in(call)

    def _new_id(self) -> str:
        self._requests += 1
        return f"{self._prefix}.{self._requests}"

    def _take_in(self, call: ClientCall) -> None:
        request = call.submitted.request
        self.calls[request] = call
        self.front.payloads.add(request, call.payload)
        self._link.tell(call.submitted)

    def withdraw(self, request: str) -> None:
        """The client of a submitted request has gone."""
        if request not in self.calls:
            return
        if self._left:
            self._over(request)
            self.front.payloads.discard(Discard(request, 0, "withdrawn", ends=True))
            self._link.settle()
        else:
            self._link.tell(RequestWithdrawn(request))

    # -- its scheduler goes ----------------------------------------------------------------

    def lose_scheduler(self) -> None:
        """Nothing is told any more, and no order is taken; what is under way goes on, and who waits
        for a response that is whole has it."""
        self._left = True
        self._outbox.close()
        for call in list(self.calls.values()):
            self._answer_if_whole(call)

    def _answer_if_whole(self, call: ClientCall) -> None:
        sample = call.whole()
        if sample is not None:
            self._answer(Answer(sample))
            self._link.settle()

    async def leave(self, take_over: Callable[[ClientCall], None]) -> None:
        """Hand the calls over that are still here, each as soon as nothing of it is under way: what
        is, is stopped, and what it has made is kept. Groups are their scheduler's, which holds what
        was made of them."""
        self.lose_scheduler()
        attempts = self.front.attempts
        running = {one.dispatch.request: one for one in attempts.every()}
        ends = []
        for request, call in list(self.calls.items()):
            attempt = running.pop(request, None)
            if attempt is None:
                self._hand_over(call, take_over)
            else:
                attempts.end(attempt)
                attempt.ended().add_done_callback(partial(self._hand_over_late, call, take_over))
                ends.append(attempt.ended())
        for attempt in running.values():
            attempt.cancel()
        if ends:
            await asyncio.wait(ends)
            await asyncio.sleep(0)
        await self.close()

    def _hand_over_late(
        self, call: ClientCall, take_over: Callable[[ClientCall], None], ended: object
    ) -> None:
        if call.submitted.request in self.calls:  # else its client has left meanwhile
            self._hand_over(call, take_over)

    def _hand_over(self, call: ClientCall, take_over: Callable[[ClientCall], None]) -> None:
        request = call.submitted.request
        del self.calls[request]
        self.front.payloads.refused(request)
        take_over(call)

    # -- what it is told -------------------------------------------------------------------

    def receive(self, frame: bytes) -> None:
        """One of the scheduler's frames. Raises msgspec.DecodeError, FrameMissing."""
        orders = read_orders(frame)
        if self._left or not self._frames.admits(orders):
            return
        for order in orders.orders:
            if self._link.broken is not None:
                return
            try:
                self._orders[type(order)](order)
            except Exception as error:
                self._link.fail(error)
            self._link.settle()

    async def close(self) -> None:
        """Nobody is told."""
        self._outbox.close()
        await self.front.close()

    def _answer(self, order: Answer) -> None:
        if order.sample.request in self.front.payloads:
            self._over(order.sample.request)
            self.front.payloads.answer(order)

    def _over(self, request: str) -> None:
        call = self.calls.pop(request, None)
        if call is not None:
            self._on_over(call)

    def _serves(self, order: Serves) -> None:
        self._versions[order.instance] = order.version

    def _dispatch(self, order: Dispatch) -> None:
        call = self.calls.get(order.request)
        if call is not None:
            call.begun(order, self._versions.get(order.instance, order.salt))
        self.front.orders[Dispatch](order)

    def _discard(self, order: Discard) -> None:
        if not order.attempt:
            self._link.forget(order.request)
        call = self.calls.get(order.request)
        if call is not None:
            call.discarded(order.attempt)
        if order.ends:
            self._over(order.request)
        self.front.orders[Discard](order)

    def _break_off(self, order: BreakOff) -> None:
        self.front.attempts.stop(order.attempt, order.reason)

    def _disbelieve(self, order: Disbelieve) -> None:
        self.front.attempts.disbelieve(order.attempt)

    def _lose(self, order: Lose) -> None:
        lost = self.front.attempts.on(order.instance)
        self.front.attempts.lose(order.instance, lambda: self._relinquish(order.instance, lost))

    def _relinquish(self, instance: str, lost: Sequence[LiveAttempt]) -> None:
        """With what the streams of those that were there have brought."""
        for running in lost:
            self._say_made(running.dispatch.request, running.dispatch.attempt)
        self._outbox.put(Relinquished(instance))

    def _take_group(self, order: TakeGroup) -> None:
        self.front.payloads.add_group(order.group, self._make(order.recipe))
        self._pieces.take(order)

    def _let_go(self, order: LetGo) -> None:
        self._pieces.let_go(order)
        self.front.payloads.let_go(order.group, order.requests)

    def _refuse(self, order: Refused) -> None:
        payload = self.front.payloads.get(order.request)
        if payload is not None:
            self._over(order.request)
            self.front.payloads.refused(order.request)
            error = RequestRejected(order.reason)
            self._link.afterwards(payload.responder.fail, "failed", error)

    def _fleet_changed(self, order: FleetChanged) -> None:
        self.max_model_len = order.max_model_len

    # -- what it tells ---------------------------------------------------------------------

    def _tell(self, event: Any) -> None:
        if isinstance(event, OfAttempt):
            call = self.calls.get(event.request)
            if call is not None:
                call.told(event)
                if self._left and isinstance(event, RequestFinished):
                    self._answer_if_whole(call)
        if isinstance(event, TokensArrived):
            streamed = self._pieces.streamed(event.request, event.attempt, event.tokens)
            if streamed is not None:
                self._outbox.put(streamed)
        elif isinstance(event, _MAKES):
            self._say_made(event.request, event.attempt)
        self._outbox.put(event)

    def _say_made(self, request: str, attempt: int) -> None:
        piece = self._pieces.of(request, attempt)
        if piece is not None:
            self._outbox.put(piece)

    def _send_frame(self, reports: list[Report]) -> None:
        self._sent += 1
        self._send(encode(Reports(self._epoch, self._sent, reports)))
