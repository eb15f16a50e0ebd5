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

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

from rollout_sched.core.model.actions import (
    Deliver,
    Discard,
    Dispatch,
    Lend,
    Pause,
    Resume,
    UpdateWeights,
)
from rollout_sched.core.model.events import (
    GateClosed,
    GateOpened,
    InstanceJoined,
    InstanceLost,
    InstancePaused,
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
from rollout_sched.metrics.attempts import AttemptIndex
from rollout_sched.metrics.fold import Handler

# ------------------------------------------------------------------------------------------
# What the instances add to the fleet's bubbles per second, updated with every event.

#: What an instance may add per second; "other" is barrier or queue_empty, depending on the fleet.
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


class Gauge:
    """The known state of one instance.

    `shares` is what it adds to the bubbles per second, in the order of SHARES. An instance that
    neither updates, nor waits for tools, nor reports a queue is *plain* and adds to only two of
    them; `shares` is None then, because it follows from `in_flight`.
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
        """The shares if it is not plain; `places` are those of the reference batch."""
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


class FleetShares:
    """Folds what the fleet adds to the bubbles. It uses `attempts`, which must be folded first.

    per_second  the sum over the current instances that are not lent to the trainer, in the order of
                SHARES
    here        their number
    acting      requests that wait for a tool, which may outlive the instance that they were on
    places      of an instance in the reference batch
    """

    __slots__ = ("_acting_on", "_attempts", "_gauges", "acting", "here", "per_second", "places")

    def __init__(self, attempts: AttemptIndex, places: float) -> None:
        self.places = places
        self.per_second = [0.0] * len(SHARES)
        self.here = 0
        self.acting = 0
        self._attempts = attempts
        self._gauges: dict[str, Gauge] = {}
        self._acting_on: dict[str, Gauge] = {}  # where requests were that now wait for a tool

    def __len__(self) -> int:
        return len(self._gauges)

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
            WeightsUpdated: self._updated,
            Dispatch: self._dispatched,
            Lend: self._lend,
            Pause: self._loading,
            UpdateWeights: self._loading,
            Deliver: self._delivered,
        }

    # -- which instances are here ------------------------------------------------------------

    def _joined(self, now: float, event: InstanceJoined) -> None:
        self._leave(event.instance)
        self._gauges[event.instance] = gauge = Gauge()
        self._count(gauge, +1)

    def _lost(self, now: float, event: InstanceLost) -> None:
        self._leave(event.instance)

    def _restored(self, now: float, event: Restored) -> None:
        """The instances join again."""
        for instance in list(self._gauges):
            self._leave(instance)

    def _leave(self, instance: str) -> None:
        gauge = self._gauges.pop(instance, None)
        if gauge is not None:
            if not gauge.lent:
                self._count(gauge, -1)
            gauge.gone = True

    def _lend(self, now: float, action: Lend) -> None:
        """The trainer has the instance."""
        gauge = self._gauges[action.instance]
        self._count(gauge, -1)
        gauge.lent = True

    def _returned(self, now: float, event: InstanceReturned) -> None:
        gauge = self._gauges.get(event.instance)
        if gauge is not None and gauge.lent:
            gauge.lent = False
            self._count(gauge, +1)

    def _count(self, gauge: Gauge, times: int) -> None:
        """Add the instance to the sums, or remove it."""
        self.here += times
        for place, share in enumerate(gauge.shares or gauge.plain_shares(self.places)):
            self.per_second[place] += times * share

    # -- what an instance does ---------------------------------------------------------------

    def _dispatched(self, now: float, action: Dispatch) -> None:
        self._load(self._gauges[action.instance], +1)

    def _ended(
        self, now: float, event: RequestFinished | RequestInterrupted | RequestFailed
    ) -> None:
        closed = self._attempts.closed
        if closed is not None:
            self._load(self._gauges[closed.instance], -1)

    def _reported(self, now: float, event: InstanceReported) -> None:
        gauge = self._gauges.get(event.instance)
        if gauge is not None and gauge.queued != event.waiting:
            gauge.queued = event.waiting
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

    def _turn_finished(self, now: float, event: TurnFinished) -> None:
        """A request in flight now waits for its tool."""
        closed = self._attempts.closed
        if closed is not None:
            gauge = self._gauges[closed.instance]
            self._load(gauge, -1)
            gauge.acting += 1
            self.acting += 1
            self._acting_on[event.request] = gauge
            self._change(gauge)

    def _tool_returned(self, now: float, event: ToolReturned | TrajectoryEnded) -> None:
        self._tool_over(event.request)

    def _discarded(self, now: float, action: Discard) -> None:
        if not action.attempt:  # all its tokens: its tool is no longer waited for
            self._tool_over(action.request)

    def _delivered(self, now: float, action: Deliver) -> None:
        if self.acting:
            for sample in action.samples:
                self._tool_over(sample.request)  # its last turn left no room for another

    def _tool_over(self, request: str) -> None:
        """The request no longer waits for a tool, if it did."""
        gauge = self._acting_on.pop(request, None)
        if gauge is not None:
            gauge.acting -= 1
            self.acting -= 1
            self._change(gauge)

    def _load(self, gauge: Gauge, by: int) -> None:
        before = gauge.in_flight
        gauge.in_flight = after = before + by
        if gauge.shares is not None:
            self._change(gauge)
            return
        totals, places = self.per_second, self.places
        if not (before and after):
            totals[_IDLE_OTHER] += (not after) - (not before)
        totals[_VACANT_OTHER] += _vacant(after, places) - _vacant(before, places)

    def _change(self, gauge: Gauge) -> None:
        """Update the sums after a change of the instance's state."""
        if gauge.gone:
            return  # a tool outlived the instance that it worked for
        before = gauge.shares or gauge.plain_shares(self.places)
        if gauge.updating or gauge.acting or gauge.queued:
            after = gauge.shares = gauge.shares_by_cause(self.places)
        else:
            gauge.shares = None
            after = gauge.plain_shares(self.places)
        if gauge.lent:
            return
        for place, share in enumerate(after):
            self.per_second[place] += share - before[place]


def _vacant(in_flight: int, places: float) -> float:
    """The empty part of the reference batch."""
    return 1.0 - in_flight / places if in_flight < places else 0.0


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


class FleetTimes:
    """Instance-seconds by state, as `state_of` names that of an instance ("" if it has left).

    A state that begins between two samples counts from the second one on, so at most one poll late.
    """

    def __init__(self, state_of: Callable[[str], str]) -> None:
        self._state_of = state_of
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._since: dict[str, tuple[str, float]] = {}

    def handlers(self) -> Mapping[type[Any], Handler]:
        of_one = (
            *(InstanceJoined, InstanceReported, InstancePaused, InstanceReturned, WeightsUpdated),
            *(GateClosed, GateOpened, InstanceLost, Pause, Resume, UpdateWeights, Lend),
        )
        of_all = (WeightsPublished, Restored)
        looks: dict[type[Any], Handler] = {}
        looks.update(dict.fromkeys(of_one, self._look_at_one))
        looks.update(dict.fromkeys(of_all, self._look_at_all))
        return looks

    def seconds(self, now: float) -> Mapping[str, float]:
        """Instance-seconds in each state, up to now."""
        self._look_at_all(now)
        return self._seconds

    def _look_at_one(self, now: float, told: Any) -> None:
        self._look(now, told.instance)

    def _look_at_all(self, now: float, told: object = None) -> None:
        for instance in list(self._since):
            self._look(now, instance)

    def _look(self, now: float, instance: str) -> None:
        before = self._since.pop(instance, None)
        if before is not None:
            state, at = before
            self._seconds[state] += now - at
        state = self._state_of(instance)
        if state:
            self._since[instance] = state, now
