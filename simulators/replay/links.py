"""Fronts between the scheduler and the instances, each at the end of a link with a delay.

This simulates `rollout_sched.link` in virtual time: answers reach the scheduler, and orders reach a
front, with a delay and in order. The scheduler's own process supervises instances, so reports about
them have no delay; a pause is over when all earlier answers of its instance have arrived.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from rollout_sched.core.model.events import Event, InstancePaused
from rollout_sched.core.model.records import MAX_SIZE
from rollout_sched.core.model.request_ids import group_of
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.traces.model import Duration


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of fronts. A message takes `delay_s` seconds one way, on average; `spread` 0.5:
    between 50 % less and 50 % more. A front writes answers one after the other, `token_s` per
    token."""

    fronts: Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)] = 1
    delay_s: Duration = 0.0
    spread: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    token_s: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class SimLinks:
    """A group with all of its requests belongs to one of the fronts."""

    def __init__(
        self, model: Links, seed: int, queue: EventQueue, tell: Callable[[Event], None]
    ) -> None:
        self._model = model
        self._queue = queue
        self._tell = tell
        self._rng = random.Random(f"links/{seed}")
        self._up = [0.0] * model.fronts  # when the last message sent so far arrives
        self._down = [0.0] * model.fronts
        self._written = [0.0] * model.fronts  # when a front has written the answers so far

    def tell(self, event: Event) -> None:
        """Report something that happened to an instance, or on one."""
        request = getattr(event, "request", None)
        if request is not None:
            written = self._write(_owner(request), getattr(event, "tokens", 0))
            self._queue.at(self._arrival(self._up, _owner(request), written), self._tell, event)
        elif isinstance(event, InstancePaused):
            self._queue.at(max(self._queue.now, *self._up), self._tell, event)
        else:
            self._tell(event)

    def down(self, carry_out: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wraps an order of the scheduler for a request: it reaches the front with a delay, in
        order."""

        def order(action: Any) -> None:
            arrival = self._arrival(self._down, _owner(action.request), self._queue.now)
            self._queue.at(arrival, carry_out, action)

        return order

    def acknowledged_at(self, request: str) -> float:
        """When its front knows, at the latest, what the scheduler made of the request's last
        answer."""
        model = self._model
        return self._up[self._front(_owner(request))] + model.delay_s * (1 + model.spread)

    def _write(self, owner: str, tokens: int) -> float:
        """When the answer is written."""
        front = self._front(owner)
        done = max(self._written[front], self._queue.now) + self._model.token_s * tokens
        self._written[front] = done
        return done

    def _arrival(self, lanes: list[float], owner: str, sent: float) -> float:
        front, model = self._front(owner), self._model
        takes_s = model.delay_s * (1 + model.spread * self._rng.uniform(-1, 1))
        lanes[front] = max(lanes[front], sent + takes_s)
        return lanes[front]

    def _front(self, owner: str) -> int:
        return zlib.crc32(owner.encode()) % self._model.fronts


def _owner(request: str) -> str:
    """The request's group, or the request itself if it has none."""
    return group_of(request) or request
