"""Which of verl's servers a request goes to, and when: a scheduler of direct requests alone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from rollout_sched.core.actions import Answer, Discard, Dispatch, Interrupt, Wake
from rollout_sched.core.errors import RolloutError
from rollout_sched.core.events import (
    InstanceJoined,
    InstanceLost,
    RequestFinished,
    RequestSubmitted,
    RequestWithdrawn,
)
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.live.event_pump import EventPump


class NoPlace(RolloutError, RuntimeError):
    """The request fits on no server that is here."""


class Placement:
    """Requests in, each answered with a server once the policy sends it to one. Make it inside a
    running event loop.

    slots      requests that a server runs at once
    kv_tokens  of a server's KV cache

    Who has a server gives it back (`release`). What is generated there is not seen: a request
    counts with its prompt and its limit until it is over.
    """

    def __init__(self, scheduler: Scheduler, slots: int, kv_tokens: int) -> None:
        self._slots = slots
        self._kv_tokens = kv_tokens
        self._requests = count(1)
        self._waiting: dict[str, _Waiting] = {}
        self._placed: dict[tuple[str, str], deque[Dispatch]] = {}  # by server and session
        self._forgotten = 0  # how often all sessions were
        self._pump = EventPump(scheduler, [], self._fail_all)
        self._pump.on(Dispatch, self._place)
        self._pump.on(Discard, self._discard)
        self._pump.on(Wake, self._pump.wake)
        for ignored in (Answer, Interrupt):
            # What is placed stays where it is until its client gives the server back.
            self._pump.on(ignored, lambda action: None)

    @property
    def servers(self) -> list[str]:
        """Those that are here."""
        return [instance.id for instance in self._pump.scheduler.view.instances]

    def in_flight(self, server: str) -> int:
        """Requests that were sent to a server and not given back."""
        return sum(len(placed) for (at, _), placed in self._placed.items() if at == server)

    async def acquire(self, session: str, prompt_tokens: int, max_tokens: int) -> str:
        """A server for one request of a session; waits until the policy lets it start.

        Raises NoPlace if it is longer than any server can hold, or the error that broke the
        scheduler.
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
        """A request of a session is over that had this server; unknown ones are ignored, as those
        of a server that has gone."""
        placed = self._placed.get((server, session))
        if not placed:
            return
        dispatch = placed.popleft()
        if not placed:
            del self._placed[server, session]
        self._pump.tell(RequestFinished(dispatch.request, dispatch.attempt, 0))

    def add(self, servers: Iterable[str]) -> None:
        """Servers that may be sent requests from now on."""
        for server in servers:
            if server not in self.servers:
                self._pump.tell(InstanceJoined(server, self._slots, self._kv_tokens))

    def remove(self, servers: Iterable[str]) -> None:
        """Servers that are sent nothing more. What runs there is its clients' to ask for anew."""
        for server in set(servers).intersection(self.servers):
            for at, session in [key for key in self._placed if key[0] == server]:
                for dispatch in self._placed.pop((at, session)):
                    self._pump.tell(RequestWithdrawn(dispatch.request))
            self._pump.tell(InstanceLost(server, "removed", asked=True))

    def forget_sessions(self) -> int:
        """The next request of a session goes where the policy likes, as if it were the first.
        Returns how many sessions were known, those forgotten before among them."""
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
                NoPlace(f"the request is {action.reason}: no server can hold it")
            )

    def _fail_all(self, error: Exception) -> None:
        for waiting in self._waiting.values():
            if not waiting.server.done():
                waiting.server.set_exception(error)


class _Waiting(NamedTuple):
    """A request that waits for its server."""

    session: str
    server: asyncio.Future[str]
