"""Decides to which of verl's servers a request goes, and when; schedules only direct requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from rollout_sched.core.errors import RolloutError
from rollout_sched.core.model.actions import Answer, Discard, Dispatch, Interrupt, Wake
from rollout_sched.core.model.events import (
    InstanceJoined,
    InstanceLost,
    RequestFinished,
    RequestSubmitted,
    RequestWithdrawn,
)
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.live import EventPump


class NoPlace(RolloutError, RuntimeError):
    """The request fits on none of the present servers."""


class Placement:
    """Takes requests and answers each with a server as soon as the policy dispatches it. Create it
    inside a running event loop.

    slots      requests that a server runs at the same time
    kv_tokens  size of a server's KV cache

    The caller returns a server with `release`. The generated tokens pass it by: a request counts
    with its prompt and its limit until it is released.
    """

    def __init__(self, scheduler: Scheduler, slots: int, kv_tokens: int) -> None:
        self._slots = slots
        self._kv_tokens = kv_tokens
        self._requests = count(1)
        self._waiting: dict[str, _Waiting] = {}
        self._placed: dict[tuple[str, str], deque[Dispatch]] = {}  # by server and session
        self._forgotten = 0  # how often all sessions were forgotten
        self._pump = EventPump(scheduler, [], self._fail_all)
        self._pump.on(Dispatch, self._place)
        self._pump.on(Discard, self._discard)
        self._pump.on(Wake, self._pump.wake)
        for ignored in (Answer, Interrupt):
            # A placed request keeps its server until its client releases it.
            self._pump.on(ignored, lambda action: None)

    @property
    def servers(self) -> list[str]:
        """The present servers."""
        return [instance.id for instance in self._pump.scheduler.view.instances]

    def in_flight(self, server: str) -> int:
        """Requests that were placed on a server and not yet released."""
        return sum(len(placed) for (at, _), placed in self._placed.items() if at == server)

    async def acquire(self, session: str, prompt_tokens: int, max_tokens: int) -> str:
        """A server for one request of a session; waits until the policy lets it start.

        Raises NoPlace if no server can hold the request, or the error that broke the scheduler.
        """
        self._pump.check()
        request = str(next(self._requests))
        server: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[request] = _Waiting(session, server)
        sticks_to = f"{self._forgotten}/{session}"
        try:
            self._pump.tell(
                RequestSubmitted(request, request, prompt_tokens, max_tokens, sticks_to)
            )
            return await server
        except asyncio.CancelledError:
            if server.cancelled():
                self._pump.tell(RequestWithdrawn(request))
            else:
                self.release(server.result(), session)
            raise
        finally:
            self._waiting.pop(request, None)

    def release(self, server: str, session: str) -> None:
        """A request of this session on this server has ended. Unknown ones are ignored, for example
        those of a removed server."""
        placed = self._placed.get((server, session))
        if not placed:
            return
        dispatch = placed.popleft()
        if not placed:
            del self._placed[server, session]
        self._pump.tell(RequestFinished(dispatch.request, dispatch.attempt, 0))

    def add(self, servers: Iterable[str]) -> None:
        """Add servers; they may get requests from now on."""
        for server in servers:
            if server not in self.servers:
                self._pump.tell(InstanceJoined(server, self._slots, self._kv_tokens))

    def remove(self, servers: Iterable[str]) -> None:
        """Remove servers; they get no more requests. Clients repeat the requests that ran on it."""
        for server in set(servers).intersection(self.servers):
            for at, session in [key for key in self._placed if key[0] == server]:
                for dispatch in self._placed.pop((at, session)):
                    self._pump.tell(RequestWithdrawn(dispatch.request))
            self._pump.tell(InstanceLost(server, "removed", requested=True))

    def forget_sessions(self) -> int:
        """Place the next request of each session as if it were the first. Returns the number of
        known sessions, including those that were forgotten before."""
        self._forgotten += 1
        return self._pump.scheduler.view.sessions

    def _place(self, dispatch: Dispatch) -> None:
        waiting = self._waiting[dispatch.request]
        if not waiting.server.done():
            self._placed.setdefault((dispatch.instance, waiting.session), deque()).append(dispatch)
            waiting.server.set_result(dispatch.instance)

    def _discard(self, action: Discard) -> None:
        waiting = self._waiting.get(action.request)
        if action.ends and waiting is not None and not waiting.server.done():
            waiting.server.set_exception(
                NoPlace(f"no server can hold the request: {action.reason}")
            )

    def _fail_all(self, error: Exception) -> None:
        for waiting in self._waiting.values():
            if not waiting.server.done():
                waiting.server.set_exception(error)


class _Waiting(NamedTuple):
    """A request that waits for its server."""

    session: str
    server: asyncio.Future[str]
