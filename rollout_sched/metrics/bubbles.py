"""Two bubbles, both shares of the fleet's instance-seconds.

The *idle bubble* counts instances with nothing in flight. That alone misleads: a straggler keeps
its instance "busy" at batch 1. The *occupancy bubble* counts empty places in a reference batch,
1 - U with verl's utilisation U = sum(dt * S * min(1, A / S)) / sum(dt * S). Each is split by cause:

    weight_update  the instance is paused for, or loading, weights
    barrier        nothing is in flight anywhere: everybody waits for the trainer (or, where
                   trainer and instances share GPUs, the trainer has them), or for rewards
    tool_wait      its trajectories wait for their tools
    kv_stall       requests wait inside the instance although it has places (by its last report)
    queue_empty    others work, but there is nothing for this one
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rollout_sched.core.actions import Deliver, Discard, Dispatch, Lend, Pause, UpdateWeights
from rollout_sched.core.events import (
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    InstanceReturned,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    Restored,
    ToolReturned,
    TrajectoryEnded,
    TurnFinished,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.metrics.attempt_index import AttemptIndex
from rollout_sched.metrics.fold import Handler

CAUSES = ("weight_update", "barrier", "tool_wait", "kv_stall", "queue_empty")

#: What an instance may add per second; "other" is barrier or queue_empty, as the fleet decides.
SHARES = (
    ("idle", "weight_update"),
    ("idle", "tool_wait"),
    ("idle", "other"),
    ("vacant", "weight_update"),
    ("vacant", "tool_wait"),
    ("vacant", "kv_stall"),
    ("vacant", "other"),
)
_IDLE_OTHER: Final = 2
_VACANT_OTHER: Final = 6


class FleetTime:
    """Seconds, and instance-seconds by cause, since the last delivery.

    `rollout_s` is how long anything was in flight.
    """

    __slots__ = (
        "_at_barrier",
        "_barrier_s",
        "_spent",
        "capacity_s",
        "idle_s",
        "rollout_s",
        "vacant_s",
    )

    def __init__(self) -> None:
        self.rollout_s = 0.0
        self.capacity_s = 0.0
        self.idle_s: dict[str, float] = {}
        self.vacant_s: dict[str, float] = {}
        self._spent = [0.0] * len(SHARES)
        self._at_barrier = [0.0] * len(SHARES)
        self._barrier_s = 0.0

    def train(self, seconds: float, instances: int) -> None:
        """The trainer has the instances' GPUs."""
        self.capacity_s += seconds * instances
        self._barrier_s += seconds * instances

    def spend(
        self, seconds: float, instances: int, shares: list[float], in_flight: int, acting: int
    ) -> None:
        """Seconds in which the fleet adds `shares` to the bubbles."""
        self.capacity_s += seconds * instances
        if in_flight:
            self.rollout_s += seconds
        spent = self._spent if in_flight or acting else self._at_barrier
        for place, share in enumerate(shares):
            if share:
                spent[place] += seconds * share

    def settle(self) -> None:
        """Turn the seconds gathered so far into causes."""
        for spent, other in ((self._spent, "queue_empty"), (self._at_barrier, "barrier")):
            for place, (bubble, cause) in enumerate(SHARES):
                totals = self.idle_s if bubble == "idle" else self.vacant_s
                _add(totals, other if cause == "other" else cause, max(0.0, spent[place]))
                spent[place] = 0.0
        for totals in (self.idle_s, self.vacant_s):
            _add(totals, "barrier", self._barrier_s)
        self._barrier_s = 0.0


class Gauge:
    """What the fold knows of one instance.

    `shares` is what it adds to the bubbles per second, in the order of SHARES. An instance that
    neither updates, nor waits for tools, nor reports a queue is *plain* and adds to two of them
    only; `shares` is None then, since it follows from `in_flight`.
    """

    __slots__ = ("acting", "gone", "in_flight", "lent", "queued", "shares", "updating")

    def __init__(self) -> None:
        self.in_flight = self.acting = self.queued = 0
        self.updating = self.gone = self.lent = False
        self.shares: list[float] | None = None

    def plain_shares(self, places: float) -> list[float]:
        shares = [0.0] * len(SHARES)
        shares[_IDLE_OTHER] = float(not self.in_flight)
        shares[_VACANT_OTHER] = _vacant(self.in_flight, places)
        return shares

    def shares_by_cause(self, places: float) -> list[float]:
        """Where it is not plain; `places` are those of the reference batch."""
        if self.updating:
            return [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
        stalled = min(self.queued, self.in_flight)
        empty = max(0.0, places - self.in_flight + stalled)
        stall = min(stalled, empty)
        tools = min(self.acting, empty - stall)
        rest = empty - stall - tools
        idle, acting = not self.in_flight, self.acting > 0
        return [
            0.0,
            float(idle and acting),
            float(idle and not acting),
            0.0,
            tools / places,
            stall / places,
            rest / places,
        ]


class Bubbles:
    """Folds the fleet's state into its bubbles; `time` is what passed since the last delivery.

    `reference_batch`: the places of an instance for the occupancy bubble, such as its even share of
    a batch. `colocated`: training takes the instances' GPUs, so the fleet counts as waiting at the
    barrier meanwhile. What was lent to the trainer before is not of the fleet until the batch is
    whole.
    """

    __slots__ = (
        "_acting",
        "_acting_on",
        "_attempts",
        "_colocated",
        "_gauges",
        "_lent",
        "_shares",
        "_training",
        "now",
        "reference_batch",
        "time",
    )

    def __init__(self, attempts: AttemptIndex, reference_batch: float, colocated: bool) -> None:
        self.reference_batch = reference_batch
        self.now = 0.0
        self.time = FleetTime()
        self._attempts = attempts
        self._colocated = colocated
        self._training = False
        self._gauges: dict[str, Gauge] = {}
        self._lent = 0  # how many of them the trainer has
        self._shares = [0.0] * len(SHARES)  # what the fleet adds per second
        self._acting = 0
        self._acting_on: dict[str, Gauge] = {}  # where requests were that wait for a tool

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            InstanceJoined: self._joined,
            InstanceLost: self._gone,
            InstanceReported: self._reported,
            InstanceReturned: self._returned,
            Restored: self._restored,
            RequestFinished: self._ended,
            RequestInterrupted: self._ended,
            RequestFailed: self._ended,
            TurnFinished: self._turn_finished,
            ToolReturned: self._tool_returned,
            TrajectoryEnded: self._tool_returned,
            Discard: self._discarded,
            WeightsPublished: self._published,
            WeightsUpdated: self._updated,
            Dispatch: self._dispatched,
            Lend: self._lend,
            Pause: self._loading,
            UpdateWeights: self._loading,
            Deliver: self._delivered,
        }

    @property
    def instances(self) -> int:
        return len(self._gauges)

    def pass_time(self, now: float) -> None:
        """Up to now the fleet was as the events before have left it."""
        seconds = now - self.now
        self.now = now
        if self._training and self._colocated:
            self.time.train(seconds, len(self._gauges))
        else:
            in_flight = len(self._attempts.open)
            here = len(self._gauges) - self._lent
            self.time.spend(seconds, here, self._shares, in_flight, self._acting)

    def close_step(self) -> FleetTime:
        """The time since the last delivery, settled; a new step begins."""
        self.time.settle()
        time, self.time = self.time, FleetTime()
        return time

    # -- what an instance adds per second ----------------------------------------------------

    def _load(self, gauge: Gauge, by: int) -> None:
        """So many more requests are in flight on the instance."""
        before = gauge.in_flight
        gauge.in_flight = after = before + by
        if gauge.shares is not None:
            self._change(gauge)
            return
        totals, places = self._shares, self.reference_batch
        if not (before and after):
            totals[_IDLE_OTHER] += (not after) - (not before)
        totals[_VACANT_OTHER] += _vacant(after, places) - _vacant(before, places)

    def _change(self, gauge: Gauge) -> None:
        """Put what the instance adds to the bubbles in step with its state."""
        if gauge.gone:
            return  # a tool outlived the instance that it worked for
        before = gauge.shares or gauge.plain_shares(self.reference_batch)
        if gauge.updating or gauge.acting or gauge.queued:
            after = gauge.shares = gauge.shares_by_cause(self.reference_batch)
        else:
            gauge.shares = None
            after = gauge.plain_shares(self.reference_batch)
        if gauge.lent:
            return
        for place, share in enumerate(after):
            self._shares[place] += share - before[place]

    # -- events and actions ------------------------------------------------------------------

    def _joined(self, now: float, event: InstanceJoined) -> None:
        self._gone(now, event)
        self._gauges[event.instance] = gauge = Gauge()
        self._count(gauge, +1)

    def _gone(self, now: float, event: InstanceJoined | InstanceLost) -> None:
        gauge = self._gauges.pop(event.instance, None)
        if gauge is None:
            return
        if gauge.lent:
            self._lent -= 1
        else:
            self._count(gauge, -1)
        gauge.gone = True

    def _restored(self, now: float, event: Restored) -> None:
        """They join anew."""
        for instance in list(self._gauges):
            self._gone(now, InstanceLost(instance))

    def _lend(self, now: float, action: Lend) -> None:
        gauge = self._gauges[action.instance]
        self._count(gauge, -1)
        gauge.lent = True
        self._lent += 1

    def _returned(self, now: float, event: InstanceReturned) -> None:
        gauge = self._gauges.get(event.instance)
        if gauge is not None and gauge.lent:
            gauge.lent = False
            self._lent -= 1
            self._count(gauge, +1)

    def _count(self, gauge: Gauge, times: int) -> None:
        """It adds to the bubbles from now on, or no longer."""
        for place, share in enumerate(gauge.shares or gauge.plain_shares(self.reference_batch)):
            self._shares[place] += times * share

    def _reported(self, now: float, event: InstanceReported) -> None:
        gauge = self._gauges.get(event.instance)
        if gauge is not None and gauge.queued != event.waiting:
            gauge.queued = event.waiting
            self._change(gauge)

    def _dispatched(self, now: float, action: Dispatch) -> None:
        self._load(self._gauges[action.instance], +1)

    def _ended(
        self, now: float, event: RequestFinished | RequestInterrupted | RequestFailed
    ) -> None:
        closed = self._attempts.closed
        if closed is not None:
            self._load(self._gauges[closed.instance], -1)

    def _turn_finished(self, now: float, event: TurnFinished) -> None:
        closed = self._attempts.closed
        if closed is None:
            return
        gauge = self._gauges[closed.instance]
        self._load(gauge, -1)
        gauge.acting += 1
        self._acting += 1
        self._acting_on[event.request] = gauge
        self._change(gauge)

    def _tool_returned(self, now: float, event: ToolReturned | TrajectoryEnded) -> None:
        self._tool_over(event.request)

    def _discarded(self, now: float, action: Discard) -> None:
        if not action.attempt:  # all that it has made: nobody waits for its tool any more
            self._tool_over(action.request)

    def _tool_over(self, request: str) -> None:
        gauge = self._acting_on.pop(request, None)
        if gauge is not None:
            gauge.acting -= 1
            self._acting -= 1
            self._change(gauge)

    def _loading(self, now: float, action: Pause | UpdateWeights) -> None:
        self._set_updating(action.instance, True)

    def _updated(self, now: float, event: WeightsUpdated) -> None:
        self._set_updating(event.instance, False)

    def _set_updating(self, instance: str, updating: bool) -> None:
        gauge = self._gauges.get(instance)
        if gauge is not None and gauge.updating != updating:
            gauge.updating = updating
            self._change(gauge)

    def _delivered(self, now: float, action: Deliver) -> None:
        self._training = action.last
        if self._acting_on:
            for sample in action.samples:
                self._tool_over(sample.request)  # its last turn left no room for another

    def _published(self, now: float, event: WeightsPublished) -> None:
        self._training = False


def _vacant(in_flight: int, places: float) -> float:
    """The empty part of the reference batch."""
    return 1.0 - in_flight / places if in_flight < places else 0.0


def _add(totals: dict[str, float], cause: str, amount: float) -> None:
    if amount:
        totals[cause] = totals.get(cause, 0.0) + amount
