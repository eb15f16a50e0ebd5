"""Folds events of instances and attempts into what the fleet adds to its bubbles."""

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
    WeightsUpdated,
)
from rollout_sched.metrics.attempt_index import AttemptIndex
from rollout_sched.metrics.fleet_shares import FleetShares
from rollout_sched.metrics.fold import Handler


class FleetFold:
    """Keeps `shares` up to date. It uses `attempts`, which must be folded first.

    `reference_batch`: the places of an instance for the occupancy bubble.
    """

    __slots__ = ("_attempts", "shares")

    def __init__(self, attempts: AttemptIndex, reference_batch: float) -> None:
        self.shares = FleetShares(reference_batch)
        self._attempts = attempts

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

    def _joined(self, now: float, event: InstanceJoined) -> None:
        self.shares.join(event.instance)

    def _lost(self, now: float, event: InstanceLost) -> None:
        self.shares.leave(event.instance)

    def _restored(self, now: float, event: Restored) -> None:
        """The instances join again."""
        self.shares.leave_all()

    def _lend(self, now: float, action: Lend) -> None:
        self.shares.lend(action.instance)

    def _returned(self, now: float, event: InstanceReturned) -> None:
        self.shares.take_back(event.instance)

    def _reported(self, now: float, event: InstanceReported) -> None:
        self.shares.set_queued(event.instance, event.waiting)

    def _dispatched(self, now: float, action: Dispatch) -> None:
        self.shares.load(action.instance, +1)

    def _ended(
        self, now: float, event: RequestFinished | RequestInterrupted | RequestFailed
    ) -> None:
        closed = self._attempts.closed
        if closed is not None:
            self.shares.load(closed.instance, -1)

    def _turn_finished(self, now: float, event: TurnFinished) -> None:
        closed = self._attempts.closed
        if closed is not None:
            self.shares.tool_begins(event.request, closed.instance)

    def _tool_returned(self, now: float, event: ToolReturned | TrajectoryEnded) -> None:
        self.shares.tool_over(event.request)

    def _discarded(self, now: float, action: Discard) -> None:
        if not action.attempt:  # all its tokens: its tool is no longer waited for
            self.shares.tool_over(action.request)

    def _loading(self, now: float, action: Pause | UpdateWeights) -> None:
        self.shares.set_updating(action.instance, True)

    def _updated(self, now: float, event: WeightsUpdated) -> None:
        self.shares.set_updating(event.instance, False)

    def _delivered(self, now: float, action: Deliver) -> None:
        if self.shares.acting:
            for sample in action.samples:
                self.shares.tool_over(sample.request)  # its last turn left no room for another
