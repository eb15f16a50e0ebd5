"""A front of a scheduler in another process: clients' requests, and the groups it was given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from rollout_sched.core.errors import RolloutError
from rollout_sched.core.model.actions import Answer, Discard, Dispatch
from rollout_sched.core.model.events import (
    Answered,
    OfAttempt,
    RequestFailed,
    TokensArrived,
    ToolReturned,
)
from rollout_sched.link.client_calls import ClientCall, ClientCalls
from rollout_sched.link.pieces import GroupPieces
from rollout_sched.link.protocol import (
    CallTool,
    ConnectInstance,
    DisconnectInstance,
    FleetChanged,
    FrameSequence,
    InstanceReleased,
    InstanceVersion,
    Lose,
    Outbox,
    RejectRequest,
    RejectStreamed,
    ReleaseGroup,
    Reports,
    StopAttempt,
    TakeGroup,
    read_accepted,
    read_orders,
)
from rollout_sched.link.remote_link import Clients, RemoteLink
from rollout_sched.live import Front, Settings
from rollout_sched.live.ports import Payload
from rollout_sched.live.requests import LiveAttempt, PayloadFactory

#: Events after which a piece may be new, or a tool's answer to one.
_MAKES = Answered | RequestFailed | ToolReturned


class RemoteFront:
    """One front, for one epoch of its scheduler. Create it inside a running event loop.

    name       unique among the fronts of the scheduler; part of its request ids
    epoch      of the scheduler; frames of another epoch are refused and counted
    run_id     prefix of the names of orders to instances
    send       passes a frame to the link, which keeps the order
    make       makes a group's payloads from its spec
    on_broken  called once, with the error, when this front cannot continue
    on_over    called with each client request that has ended

    calls      the requests of its clients
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
        self.max_model_len = 0
        self._left = False
        self._frames = FrameSequence(epoch)
        self._make = make
        self._outbox = Outbox(Reports, epoch, send)
        self._link = RemoteLink(self._tell, clients, on_broken)
        self.front = Front(self._link, settings, run_id)
        self.calls = ClientCalls(f"{run_id}.{name}", self.front, self._link, on_over)
        self._pieces = GroupPieces(self.front.payloads)
        self._orders: dict[type[Any], Callable[[Any], None]] = {
            **self.front.orders,
            ConnectInstance: self._link.reach,
            DisconnectInstance: self._departed,
            InstanceVersion: self.calls.serves,
            Dispatch: self._dispatch,
            Answer: self.calls.answer,
            Discard: self._discard,
            CallTool: self._link.call_tool,
            StopAttempt: self._stop_attempt,
            RejectStreamed: self._reject_streamed,
            Lose: self._lose,
            TakeGroup: self._take_group,
            ReleaseGroup: self._release_group,
            RejectRequest: self.calls.refuse,
            FleetChanged: self._fleet_changed,
        }

    @property
    def refused(self) -> int:
        """Number of refused frames: of another epoch, or repeated."""
        return self._frames.refused

    # -- its scheduler goes ----------------------------------------------------------------

    def lose_scheduler(self) -> None:
        """Report nothing more and accept no orders. Running attempts continue, and complete
        responses are answered."""
        self._left = True
        self._outbox.close()
        self.calls.lose_scheduler()

    async def leave(self, take_over: Callable[[ClientCall], None]) -> None:
        """Hand over the remaining calls, each when it has no running attempt: running attempts are
        stopped, and their tokens are kept. Groups stay with their scheduler, which has their
        tokens."""
        self.lose_scheduler()
        attempts = self.front.attempts
        running = {one.dispatch.request: one for one in attempts.every()}
        ends = []
        for call in self.calls.every():
            attempt = running.pop(call.submitted.request, None)
            if attempt is None:
                self.calls.transfer(call, take_over)
            else:
                attempts.end(attempt)
                ended = attempt.ended()
                ended.add_done_callback(partial(self._hand_over, call, take_over))
                ends.append(ended)
        for attempt in running.values():
            attempt.cancel()
        try:
            if ends:
                await asyncio.wait(ends)
                await asyncio.sleep(0)
        finally:
            await self.close()

    def _hand_over(
        self, call: ClientCall, take_over: Callable[[ClientCall], None], ended: object
    ) -> None:
        self.calls.transfer(call, take_over)

    # -- what it is told -------------------------------------------------------------------

    def receive(self, frame: bytes) -> None:
        """Handle a frame of the scheduler. Raises msgspec.DecodeError, FrameMissing."""
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
        """Stop everything without reporting it."""
        self._outbox.close()
        await self.front.close()
        self._link.leave_all()

    def _departed(self, order: DisconnectInstance) -> None:
        self._link.leave(order.instance)
        self.calls.departed(order.instance)

    def _dispatch(self, order: Dispatch) -> None:
        self.calls.begun(order)
        self.front.orders[Dispatch](order)

    def _discard(self, order: Discard) -> None:
        if not order.attempt:
            self._link.forget(order.request)
        self.calls.discarded(order)
        self.front.orders[Discard](order)

    def _stop_attempt(self, order: StopAttempt) -> None:
        self.front.attempts.stop(order.attempt, order.reason)

    def _reject_streamed(self, order: RejectStreamed) -> None:
        self.front.attempts.reject_streamed(order.attempt)

    def _lose(self, order: Lose) -> None:
        lost = self.front.attempts.on(order.instance)
        self.front.attempts.lose(
            order.instance, lambda: self._release_instance(order.instance, lost)
        )

    def _release_instance(self, instance: str, lost: Sequence[LiveAttempt]) -> None:
        """Report the streamed tokens of the lost attempts, then InstanceReleased."""
        for running in lost:
            self._say_made(running.dispatch.request, running.dispatch.attempt)
        self._outbox.put(InstanceReleased(instance))

    def _take_group(self, order: TakeGroup) -> None:
        self.front.payloads.add_group(order.group, self._make(order.spec))
        self._pieces.take(order)

    def _release_group(self, order: ReleaseGroup) -> None:
        self._pieces.release(order)
        self.front.payloads.release(order.group, order.requests)

    def _fleet_changed(self, order: FleetChanged) -> None:
        self.max_model_len = order.max_model_len

    # -- what it tells ---------------------------------------------------------------------

    def _tell(self, event: Any) -> None:
        if isinstance(event, OfAttempt):
            self.calls.reported(event)
        if isinstance(event, TokensArrived):
            streamed = self._pieces.streamed(event.request, event.attempt, event.tokens)
            if streamed is not None:
                self._outbox.put(streamed)
        elif isinstance(event, _MAKES):
            self._say_made(event.request, event.attempt)
        self._outbox.put(event)

    def _say_made(self, request: str, attempt: int) -> None:
        piece = self._pieces.piece_of(request, attempt)
        if piece is not None:
            self._outbox.put(piece)


class NoScheduler(RolloutError, RuntimeError):
    """No scheduler has connected yet."""


class FrontCalls:
    """Accepts clients' requests as a driver does, and keeps them across losses of the scheduler: a
    new scheduler gets all requests with the tokens made so far. Without a scheduler, running
    attempts continue and new requests wait. Create it inside a running event loop.

    name       unique over all fronts and their starts
    on_broken  called with the error when it cannot carry out an order: reconnect it
    """

    def __init__(self, name: str, clients: Clients, on_broken: Callable[[Exception], None]) -> None:
        self.connected = False
        self.connections = 0
        self._refused = 0  # by the fronts of earlier schedulers
        self._name = name
        self._clients = clients
        self._on_broken = on_broken
        self._remote: RemoteFront | None = None
        self._calls: dict[str, tuple[RemoteFront, ClientCall]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def known(self) -> bool:
        """Whether a scheduler has ever connected."""
        return self._remote is not None

    @property
    def refused(self) -> int:
        """Number of refused frames of orders."""
        return self._refused + (0 if self._remote is None else self._remote.refused)

    # -- its clients -----------------------------------------------------------------------

    def max_model_len(self) -> int:
        """Tokens of prompt and response that some instance takes; 0 without a scheduler."""
        return 0 if self._remote is None else self._remote.max_model_len

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
        """Submit a request, which is answered when it finishes, and return its id. Raises
        NoScheduler before the first scheduler has connected."""
        remote = self._remote
        if remote is None:
            raise NoScheduler("no scheduler has connected yet")
        name = remote.calls.submit(
            payload, prompt_tokens, max_tokens, group, session, priority, client
        )
        self._calls[name] = remote, remote.calls[name]
        return name

    def withdraw(self, request: str) -> None:
        """The client of a submitted request has gone."""
        held = self._calls.get(request)
        if held is not None:
            remote, call = held
            remote.calls.withdraw(call.submitted.request)

    # -- its schedulers --------------------------------------------------------------------

    def connect(self, accepted: bytes, send: Callable[[bytes], None]) -> None:
        """A scheduler has connected; `send` takes the frames for it. Raises msgspec.DecodeError."""
        told = read_accepted(accepted)
        self.connections += 1
        before = self._remote
        remote = self._remote = RemoteFront(
            f"{self._name}.{self.connections}",
            told.epoch,
            told.epoch,
            send=send,
            clients=self._clients,
            make=told.factory,
            settings=told.settings,
            on_broken=self._on_broken,
            on_over=self._over,
        )
        self.connected = True
        if before is not None:
            remote.max_model_len = before.max_model_len  # until the new scheduler reports it
            self._refused += before.refused
            self._spawn(before.leave(self._take_over))

    def receive(self, frame: bytes) -> None:
        """Handle a frame of the connected scheduler. Raises msgspec.DecodeError."""
        if self._remote is not None:
            self._remote.receive(frame)

    def disconnected(self) -> None:
        """The scheduler is gone, or cannot be reached."""
        self.connected = False
        if self._remote is not None:
            self._remote.lose_scheduler()

    async def close(self) -> None:
        """Stop everything without reporting it."""
        self.disconnected()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._remote is not None:
            await self._remote.close()

    def _take_over(self, call: ClientCall) -> None:
        assert self._remote is not None  # the new one
        self._calls[call.name] = self._remote, call
        self._remote.calls.take_over(call)

    def _over(self, call: ClientCall) -> None:
        del self._calls[call.name]

    def _spawn(self, leaving: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(leaving)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
