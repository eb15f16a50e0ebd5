"""What the instances add to the fleet's bubbles per second, updated with every event."""

from __future__ import annotations

from typing import Final

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
    """`per_second`, in the order of SHARES, is the sum over the current instances that are not lent
    to the trainer; their number is `here`.

    `places`: of an instance in the reference batch. `acting`: requests that wait for a tool, which
    may outlive the instance that they were on.
    """

    __slots__ = ("_acting_on", "_gauges", "acting", "here", "per_second", "places")

    def __init__(self, places: float) -> None:
        self.places = places
        self.per_second = [0.0] * len(SHARES)
        self.here = 0
        self.acting = 0
        self._gauges: dict[str, Gauge] = {}
        self._acting_on: dict[str, Gauge] = {}  # where requests were that now wait for a tool

    def __len__(self) -> int:
        return len(self._gauges)

    # -- which instances are here ------------------------------------------------------------

    def join(self, instance: str) -> None:
        self.leave(instance)
        self._gauges[instance] = gauge = Gauge()
        self._count(gauge, +1)

    def leave(self, instance: str) -> None:
        gauge = self._gauges.pop(instance, None)
        if gauge is not None:
            if not gauge.lent:
                self._count(gauge, -1)
            gauge.gone = True

    def leave_all(self) -> None:
        for instance in list(self._gauges):
            self.leave(instance)

    def lend(self, instance: str) -> None:
        """The trainer has the instance."""
        gauge = self._gauges[instance]
        self._count(gauge, -1)
        gauge.lent = True

    def take_back(self, instance: str) -> None:
        gauge = self._gauges.get(instance)
        if gauge is not None and gauge.lent:
            gauge.lent = False
            self._count(gauge, +1)

    def _count(self, gauge: Gauge, times: int) -> None:
        """Add the instance to the sums, or remove it."""
        self.here += times
        for place, share in enumerate(gauge.shares or gauge.plain_shares(self.places)):
            self.per_second[place] += times * share

    # -- what an instance does ---------------------------------------------------------------

    def load(self, instance: str, by: int) -> None:
        """`by` more requests are in flight there."""
        self._load(self._gauges[instance], by)

    def set_queued(self, instance: str, queued: int) -> None:
        """`queued` requests wait inside it, as it reports."""
        gauge = self._gauges.get(instance)
        if gauge is not None and gauge.queued != queued:
            gauge.queued = queued
            self._change(gauge)

    def set_updating(self, instance: str, updating: bool) -> None:
        gauge = self._gauges.get(instance)
        if gauge is not None and gauge.updating != updating:
            gauge.updating = updating
            self._change(gauge)

    def tool_begins(self, request: str, instance: str) -> None:
        """A request in flight there now waits for its tool."""
        gauge = self._gauges[instance]
        self._load(gauge, -1)
        gauge.acting += 1
        self.acting += 1
        self._acting_on[request] = gauge
        self._change(gauge)

    def tool_over(self, request: str) -> None:
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
