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
from typing import Any

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
from rollout_sched.metrics.fleet_shares import SHARES, FleetShares
from rollout_sched.metrics.fold import Handler

CAUSES = ("weight_update", "barrier", "tool_wait", "kv_stall", "queue_empty")


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


class Bubbles:
    """Folds the fleet's state into its bubbles; `time` is what passed since the last delivery.

    `reference_batch`: the places of an instance for the occupancy bubble, such as its even share of
    a batch. `colocated`: training takes the instances' GPUs, so the fleet counts as waiting at the
    barrier meanwhile. What was lent to the trainer before is not of the fleet until the batch is
    whole.
    """

    __slots__ = ("_attempts", "_colocated", "_fleet", "_training", "now", "time")

    def __init__(self, attempts: AttemptIndex, reference_batch: float, colocated: bool) -> None:
        self.now = 0.0
        self.time = FleetTime()
        self._attempts = attempts
        self._colocated = colocated
        self._training = False
        self._fleet = FleetShares(reference_batch)

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            InstanceJoined: self._joined,
            InstanceLost: self._lost,
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
        return len(self._fleet)

    @property
    def reference_batch(self) -> float:
        return self._fleet.places

    def pass_time(self, now: float) -> None:
        """Up to now the fleet was as the events before have left it."""
        seconds = now - self.now
        self.now = now
        if self._training and self._colocated:
            self.time.train(seconds, len(self._fleet))
        else:
            fleet, in_flight = self._fleet, len(self._attempts.open)
            self.time.spend(seconds, fleet.here, fleet.per_second, in_flight, fleet.acting)

    def close_step(self) -> FleetTime:
        """The time since the last delivery, settled; a new step begins."""
        self.time.settle()
        time, self.time = self.time, FleetTime()
        return time

    # -- events and actions ------------------------------------------------------------------

    def _joined(self, now: float, event: InstanceJoined) -> None:
        self._fleet.join(event.instance)

    def _lost(self, now: float, event: InstanceLost) -> None:
        self._fleet.leave(event.instance)

    def _restored(self, now: float, event: Restored) -> None:
        """They join anew."""
        self._fleet.leave_all()

    def _lend(self, now: float, action: Lend) -> None:
        self._fleet.lend(action.instance)

    def _returned(self, now: float, event: InstanceReturned) -> None:
        self._fleet.take_back(event.instance)

    def _reported(self, now: float, event: InstanceReported) -> None:
        self._fleet.set_queued(event.instance, event.waiting)

    def _dispatched(self, now: float, action: Dispatch) -> None:
        self._fleet.load(action.instance, +1)

    def _ended(
        self, now: float, event: RequestFinished | RequestInterrupted | RequestFailed
    ) -> None:
        closed = self._attempts.closed
        if closed is not None:
            self._fleet.load(closed.instance, -1)

    def _turn_finished(self, now: float, event: TurnFinished) -> None:
        closed = self._attempts.closed
        if closed is not None:
            self._fleet.tool_begins(event.request, closed.instance)

    def _tool_returned(self, now: float, event: ToolReturned | TrajectoryEnded) -> None:
        self._fleet.tool_over(event.request)

    def _discarded(self, now: float, action: Discard) -> None:
        if not action.attempt:  # all that it has made: nobody waits for its tool any more
            self._fleet.tool_over(action.request)

    def _loading(self, now: float, action: Pause | UpdateWeights) -> None:
        self._fleet.set_updating(action.instance, True)

    def _updated(self, now: float, event: WeightsUpdated) -> None:
        self._fleet.set_updating(event.instance, False)

    def _delivered(self, now: float, action: Deliver) -> None:
        self._training = action.last
        if self._fleet.acting:
            for sample in action.samples:
                self._fleet.tool_over(sample.request)  # its last turn left no room for another

    def _published(self, now: float, event: WeightsPublished) -> None:
        self._training = False


def _add(totals: dict[str, float], cause: str, amount: float) -> None:
    if amount:
        totals[cause] = totals.get(cause, 0.0) + amount
