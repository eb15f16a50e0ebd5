"""A front's link to a scheduler in another process (`live.requests.link`)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import Event
from rollout_sched.link.protocol import CallTool, ConnectInstance, InstanceSuspected
from rollout_sched.live.ports import InstanceClient, Outcome, Suspicion
from rollout_sched.live.requests import Verdict

log = logging.getLogger(__name__)


class Clients(Protocol):
    """A front's own connections to the instances, created when first needed."""

    def client(self, instance: str) -> InstanceClient: ...

    def reach(self, instance: str, key: str) -> None:
        """The instance has joined, perhaps again. `key`: its API key; "": the one used before."""

    def leave(self, instance: str) -> None:
        """Called once for each `reach`: nothing more is sent to the instance, and no attempt runs
        on it."""

    def unverified(self, instance: str) -> asyncio.Event | None:
        """None if work may be sent to the instance; else the event to wait for."""


class RemoteLink:
    """Sends events out; what a local scheduler would return at once comes back as an order.

    Answers are checked at the host, where the instances are supervised, so all are accepted at the
    front; an order discards those that turn out to be untrue.
    """

    def __init__(
        self,
        say: Callable[[Any], None],
        clients: Clients,
        on_broken: Callable[[Exception], None],
    ) -> None:
        self.tell: Callable[[Event], None] = say
        self.broken: Exception | None = None
        self._say = say
        self._clients = clients
        self._on_broken = on_broken
        self._reached: set[str] = set()
        self._later: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._turns: dict[str, tuple[int, Callable[[], None]]] = {}

    def fail(self, error: Exception) -> None:
        """A front that cannot carry out an order is broken: it ends."""
        if self.broken is None:
            log.critical("an order could not be carried out", exc_info=error)
            self.broken = error
            self._on_broken(error)

    def client(self, instance: str) -> InstanceClient:
        return self._clients.client(instance)

    def unverified(self, instance: str) -> asyncio.Event | None:
        return self._clients.unverified(instance)

    def reach(self, order: ConnectInstance) -> None:
        self._clients.reach(order.instance, order.key)
        if order.instance in self._reached:
            self._clients.leave(order.instance)
        self._reached.add(order.instance)

    def leave(self, instance: str) -> None:
        if instance in self._reached:
            self._reached.remove(instance)
            self._clients.leave(instance)

    def leave_all(self) -> None:
        for instance in list(self._reached):
            self.leave(instance)

    def suspect(self, instance: str, of: Suspicion) -> None:
        self._say(InstanceSuspected(instance, of))

    def judge(self, dispatch: Dispatch, outcome: Outcome, *, stopped: bool) -> Verdict:
        return None

    # -- what is answered by an order ------------------------------------------------------

    def when_acting(self, dispatch: Dispatch, begin: Callable[[], None]) -> None:
        self._turns[dispatch.request] = (dispatch.attempt, begin)

    def call_tool(self, order: CallTool) -> None:
        attempt, begin = self._turns.pop(order.request, (0, None))
        if begin is not None and attempt == order.attempt:
            begin()

    def forget(self, request: str) -> None:
        """A request has ended or all its tokens are discarded: do not call its tool."""
        self._turns.pop(request, None)

    # -- afterwards ------------------------------------------------------------------------

    def defer(self, call: Callable[..., object], *arguments: Any) -> None:
        self._later.append((call, arguments))

    def settle(self) -> None:
        """An order has been handled: make the calls that were put off."""
        while self._later:
            call, arguments = self._later.popleft()
            try:
                call(*arguments)
            except Exception:
                log.exception("an answer could not be delivered")
