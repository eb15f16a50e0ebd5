"""Two bubbles, both shares of the fleet's instance-seconds.

The *idle bubble* counts instances with nothing in flight. This value alone misleads: a straggler
keeps its instance "busy" at batch 1. The *occupancy bubble* counts empty places in a reference
batch, 1 - U with verl's utilisation U = sum(dt * S * min(1, A / S)) / sum(dt * S). Each is split
by cause:

    weight_update  the instance is paused for, or loading, weights
    barrier        nothing is in flight anywhere: all wait for the trainer (or the trainer has the
                   GPUs, if it shares them with the instances), or for rewards
    tool_wait      trajectories of the instance wait for their tools
    kv_stall       requests wait inside the instance although it has places (by its last report)
    queue_empty    other instances work, but there is nothing for this one
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_sched.core.actions import Deliver
from rollout_sched.core.events import WeightsPublished
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
        """The trainer has the GPUs of the instances for `seconds`."""
        self.capacity_s += seconds * instances
        self._barrier_s += seconds * instances

    def spend(
        self, seconds: float, instances: int, shares: list[float], in_flight: int, acting: int
    ) -> None:
        """`seconds` in which the fleet adds `shares` per second to the bubbles."""
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
    """Integrates the fleet's shares over time; `time` covers the time since the last delivery.

    `colocated`: training takes the instances' GPUs, so the fleet then counts as waiting at the
    barrier. Instances lent to the trainer before do not count until the batch is whole.
    """

    __slots__ = ("_attempts", "_colocated", "_fleet", "_training", "now", "time")

    def __init__(self, attempts: AttemptIndex, fleet: FleetShares, colocated: bool) -> None:
        self.now = 0.0
        self.time = FleetTime()
        self._attempts = attempts
        self._colocated = colocated
        self._training = False
        self._fleet = fleet

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {Deliver: self._delivered, WeightsPublished: self._published}

    @property
    def instances(self) -> int:
        return len(self._fleet)

    @property
    def reference_batch(self) -> float:
        return self._fleet.places

    def pass_time(self, now: float) -> None:
        """Account for the time up to `now`, with the fleet as the earlier events left it."""
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

    def _delivered(self, now: float, action: Deliver) -> None:
        self._training = action.last

    def _published(self, now: float, event: WeightsPublished) -> None:
        self._training = False


def _add(totals: dict[str, float], cause: str, amount: float) -> None:
    if amount:
        totals[cause] = totals.get(cause, 0.0) + amount
