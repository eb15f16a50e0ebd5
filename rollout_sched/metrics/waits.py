"""Why a request waited: since which event, and in which state the fleet was meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rollout_sched.core.model.actions import (
    Answer,
    Deliver,
    Discard,
    Dispatch,
    Lend,
    Pause,
    Resume,
    UpdateWeights,
)
from rollout_sched.core.model.events import (
    GroupSubmitted,
    InstanceJoined,
    InstanceLost,
    InstanceReturned,
    RequestSubmitted,
    Restored,
    ToolReturned,
    WeightsUpdated,
)
from rollout_sched.metrics.attempts import Closed
from rollout_sched.metrics.fold import Handler

#: The event since which a request waits.
SINCE = (
    "it was submitted",
    "it was interrupted",
    "its tool returned",
    "an attempt failed",
    "its instance was lost",
    "the scheduler restarted",
)
_SUBMITTED, _INTERRUPTED, _TOOL, _FAILED, _LOST, _RESTARTED = range(len(SINCE))
_SINCE_OUTCOME = {"interrupted": _INTERRUPTED, "failed": _FAILED, "lost": _LOST}

#: The state of the fleet for most of that time.
CAUSES = (
    "places were free: batching, ordering, admission or routing held it back",
    "all places were taken",
    "all instances were updated, paused or lent",
    "no instance was here",
)
_HELD, _TAKEN, _STOPPED, _NOBODY = range(len(CAUSES))


class Wait(NamedTuple):
    """`since` and `cause` are indices into SINCE and CAUSES."""

    seconds: float
    since: int
    cause: int


class _Ready(NamedTuple):
    at_s: float
    since: int
    spent_s: tuple[float, ...]  # seconds by cause before this wait


class _Fleet:
    """Seconds by cause: the state of the fleet, as a waiting request sees it."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._in_flight: dict[str, int] = {}
        self._stopped: set[str] = set()
        self._open = 0  # instances with a free place that are not stopped
        self._spent_s = [0.0] * len(CAUSES)
        self._now = 0.0

    def spent_s(self, now: float) -> tuple[float, ...]:
        """Seconds by cause, up to now."""
        self._spent_s[self._cause()] += now - self._now
        self._now = now
        return tuple(self._spent_s)

    def join(self, now: float, instance: str, slots: int) -> None:
        self.leave(now, instance)
        self._slots[instance], self._in_flight[instance] = slots, 0
        self._open += slots > 0

    def leave(self, now: float, instance: str) -> None:
        self.spent_s(now)
        if instance in self._slots:
            self._open -= self._is_open(instance)
            self._stopped.discard(instance)
            del self._slots[instance], self._in_flight[instance]

    def clear(self, now: float) -> None:
        for instance in list(self._slots):
            self.leave(now, instance)

    def load(self, now: float, instance: str, by: int) -> None:
        """`by` more attempts are on the instance."""
        self.spent_s(now)
        if instance in self._slots:
            before = self._is_open(instance)
            self._in_flight[instance] += by
            self._open += self._is_open(instance) - before

    def stop(self, now: float, instance: str, *, stopped: bool) -> None:
        self.spent_s(now)
        if instance in self._slots:
            before = self._is_open(instance)
            (self._stopped.add if stopped else self._stopped.discard)(instance)
            self._open += self._is_open(instance) - before

    def _is_open(self, instance: str) -> bool:
        free = self._in_flight[instance] < self._slots[instance]
        return free and instance not in self._stopped

    def _cause(self) -> int:
        if self._open:
            return _HELD
        if not self._slots:
            return _NOBODY
        return _STOPPED if len(self._stopped) == len(self._slots) else _TAKEN


class Waits:
    """Folds the events that make a request ready for dispatch, and its dispatch.

    last  the wait that the current Dispatch ended

    Run it before the folds that use it, and call `closed` for every attempt that is over. The
    requests of a group are ready when the group is submitted: if a policy launches it later, the
    time counts as the policy's.
    """

    def __init__(self) -> None:
        self.last = Wait(0.0, _SUBMITTED, _HELD)
        self._fleet = _Fleet()
        self._groups: dict[str, _Ready] = {}
        self._requests: dict[str, _Ready] = {}

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            GroupSubmitted: self._submitted,
            RequestSubmitted: self._asked,
            Dispatch: self._dispatched,
            ToolReturned: self._tool_returned,
            Discard: self._discarded,
            Deliver: self._delivered,
            Answer: self._answered,
            InstanceJoined: self._joined,
            InstanceLost: self._lost,
            InstanceReturned: self._going_on,
            WeightsUpdated: self._going_on,
            Resume: self._going_on,
            Pause: self._stopped,
            UpdateWeights: self._stopped,
            Lend: self._stopped,
            Restored: self._restored,
        }

    def closed(self, closed: Closed) -> None:
        """An attempt is over."""
        dispatch = closed.attempt.dispatch
        self._fleet.load(closed.end_s, dispatch.instance, -1)
        since = _SINCE_OUTCOME.get(closed.outcome)
        if since is not None:
            self._ready(closed.end_s, dispatch.request, since)

    def _ready(self, now: float, request: str, since: int) -> None:
        self._requests[request] = _Ready(now, since, self._fleet.spent_s(now))

    def _submitted(self, now: float, event: GroupSubmitted) -> None:
        self._groups[event.group] = _Ready(now, _SUBMITTED, self._fleet.spent_s(now))

    def _asked(self, now: float, event: RequestSubmitted) -> None:
        self._ready(now, event.request, _SUBMITTED)

    def _tool_returned(self, now: float, event: ToolReturned) -> None:
        self._ready(now, event.request, _TOOL)

    def _dispatched(self, now: float, action: Dispatch) -> None:
        ready = self._requests.pop(action.request, None) or self._groups.get(action.group)
        spent_s = self._fleet.spent_s(now)
        if ready is None:  # it was here before the fold began
            self.last = Wait(0.0, _SUBMITTED, _HELD)
        else:
            each_s = [after - before for after, before in zip(spent_s, ready.spent_s, strict=True)]
            cause = max(range(len(CAUSES)), key=each_s.__getitem__)
            self.last = Wait(now - ready.at_s, ready.since, cause)
        self._fleet.load(now, action.instance, +1)

    def _discarded(self, now: float, action: Discard) -> None:
        if action.ends:
            self._requests.pop(action.request, None)

    def _delivered(self, now: float, action: Deliver) -> None:
        for sample in action.samples:
            self._requests.pop(sample.request, None)
            self._groups.pop(sample.group, None)

    def _answered(self, now: float, action: Answer) -> None:
        self._requests.pop(action.sample.request, None)

    # -- the fleet -------------------------------------------------------------------------

    def _joined(self, now: float, event: InstanceJoined) -> None:
        self._fleet.join(now, event.instance, event.slots)

    def _lost(self, now: float, event: InstanceLost) -> None:
        self._fleet.leave(now, event.instance)

    def _stopped(self, now: float, action: Pause | UpdateWeights | Lend) -> None:
        self._fleet.stop(now, action.instance, stopped=True)

    def _going_on(self, now: float, said: InstanceReturned | WeightsUpdated | Resume) -> None:
        self._fleet.stop(now, said.instance, stopped=False)

    def _restored(self, now: float, event: Restored) -> None:
        """Groups are not submitted again, and the instances join again."""
        restarted = _Ready(now, _RESTARTED, self._fleet.spent_s(now))
        self._groups = dict.fromkeys(self._groups, restarted)
        self._fleet.clear(now)
