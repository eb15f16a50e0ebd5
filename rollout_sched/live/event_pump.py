"""Passes events to the scheduler, one after the other, and has its actions carried out."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Action, Wake
from rollout_sched.core.model.events import Event, Woke
from rollout_sched.core.scheduler import Scheduler

log = logging.getLogger(__name__)


class RunClock:
    """Counts the seconds of a run by the clock of the running event loop, from its creation or from
    where an earlier scheduler of the run ended."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._earlier_s = 0.0  # seconds of earlier schedulers

    @property
    def now(self) -> float:
        return self._earlier_s + (self._loop.time() - self._origin)

    def resume_at(self, now: float) -> None:
        """Continue from `now`, where an earlier scheduler of the run ended."""
        self._origin = self._loop.time()
        self._earlier_s = now  # subtracted from the origin, it could round to an earlier time

    def call_at(self, at: float, call: Callable[..., object], *arguments: Any) -> None:
        """Call `call` when `now` is `at`, or a little later."""
        when = self._origin + (at - self._earlier_s)
        while self._earlier_s + (when - self._origin) < at:  # the sums are rounded
            when = math.nextafter(when, math.inf)
        self._loop.call_at(when, call, *arguments)


Observer = Callable[[float, Event, list[Action]], None]


class EventPump:
    """Gives events to the scheduler, has its actions carried out, and shows both to observers.

    `now` counts seconds of the loop's clock from the creation of this object, or continues an
    earlier run (`resume_at`). Every observer, such as the journal and the metrics, sees every
    (now, event, actions). An observer that raises is logged and gets no more events: a record with
    gaps is worse than one that ends.

    `broken`: why the scheduler cannot continue; `on_broken` is called once with it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        observers: Sequence[Observer],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self.scheduler = scheduler
        self.observers = list(observers)
        self.broken: Exception | None = None
        self._on_broken = on_broken
        self._before: dict[type[Any], Callable[[Any], None]] = {}
        self._carry_out: dict[type[Any], Callable[[Any], None]] = {}
        self._watchers: dict[type[Any], list[Callable[[Any], None]]] = {}
        self._clock = RunClock()
        self._inbox: deque[Event] = deque()
        self._handling = False
        self._defer: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._anomalies = 0

    @property
    def now(self) -> float:
        return self._clock.now

    def resume_at(self, now: float) -> None:
        """Continue the clock from `now`, where an earlier run of the same scheduler ended."""
        self._clock.resume_at(now)

    def on(self, kind: type[Any], carry_out: Callable[[Any], None]) -> None:
        """Carry out actions of this type with `carry_out`. An error in it breaks the scheduler."""
        before = self._before.get(kind)
        self._carry_out[kind] = carry_out if before is None else _both(before, carry_out)

    def before(self, kind: type[Any], call: Callable[[Any], None]) -> None:
        """Call `call` with every action of this type before it is carried out, even if `on` is
        called later. An error in it breaks the scheduler."""
        self._before[kind] = call
        self._carry_out[kind] = _both(call, self._carry_out[kind])

    def watch(self, watcher: Callable[[Any], None], *kinds: type[Any]) -> None:
        """Call `watcher` with every event of these types, before its actions are carried out."""
        for kind in kinds:
            self._watchers.setdefault(kind, []).append(watcher)

    def defer(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call this when the current event has been handled: a receiver of an answer may send a new
        request at once, which must not happen within an event."""
        self._defer.append((call, arguments))

    def tell(self, event: Event) -> None:
        """Handle an event. Raises CallerError, and changes nothing, if the event is invalid. A
        broken scheduler gets no more events."""
        if self._handling:
            self._inbox.append(event)
            return
        self._handling = True
        try:
            self._handle(event)
            self._empty_inbox()
        finally:
            self._handling = False
        while self._defer:
            call, arguments = self._defer.popleft()
            try:
                call(*arguments)
            except Exception:
                log.exception("an answer could not be delivered")

    def wake(self, action: Wake) -> None:
        self._clock.call_at(action.at, self.tell, Woke())

    def fail(self, error: Exception) -> None:
        """The scheduler's state can no longer be trusted: everything that waits for it fails."""
        if self.broken is not None:
            return
        log.critical("the scheduler is broken and stops", exc_info=error)
        self.broken = error
        self._on_broken(error)

    def check(self) -> None:
        """Raises what broke the scheduler, if anything has."""
        if self.broken is not None:
            raise self.broken

    def _empty_inbox(self) -> None:
        while self._inbox:
            event = self._inbox.popleft()
            try:
                self._handle(event)
            except CallerError as error:  # not the fault of the caller that sent the first event
                log.error("%s was refused: %s", _named(event), error)

    def _handle(self, event: Event) -> None:
        if self.broken is not None:
            return
        now = self._clock.now
        try:
            actions = self.scheduler.handle(event, now)
        except CallerError:
            raise
        except Exception as error:
            self.fail(error)
            return
        self._show(now, event, actions)
        try:
            for action in actions:
                self._carry_out[type(action)](action)
        except Exception as error:
            self.fail(error)
        anomalies = self.scheduler.view.anomalies
        if anomalies and sum(anomalies.values()) != self._anomalies:
            self._anomalies = sum(anomalies.values())
            log.warning("unexpected event %s; anomalies: %s", _named(event), dict(anomalies))

    def _show(self, now: float, event: Event, actions: list[Action]) -> None:
        """Show the event to all observers and watchers; the failure of one affects no other."""
        for observer in self.observers:
            try:
                observer(now, event, actions)
            except Exception:
                log.exception("observer %r failed and gets no more events", observer)
                self.observers = [other for other in self.observers if other is not observer]
        for watcher in self._watchers.get(type(event), ()):
            try:
                watcher(event)
            except Exception:
                log.exception("%r failed at %s", watcher, _named(event))


def _named(event: Event) -> str:
    """The type and subject of an event, without its reason, which may quote a prompt."""
    names = ("instance", "group", "request", "attempt")
    about = [f"{name} {getattr(event, name)}" for name in names if hasattr(event, name)]
    return " ".join([type(event).__name__, *about])


def _both(first: Callable[[Any], None], second: Callable[[Any], None]) -> Callable[[Any], None]:
    def carry_out(action: Any) -> None:
        first(action)
        second(action)

    return carry_out
