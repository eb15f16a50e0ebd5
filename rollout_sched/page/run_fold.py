"""Folds a journal to the record that a page draws."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rollout_sched.core.actions import Action, Deliver
from rollout_sched.core.events import (
    Event,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    Restored,
    WeightsPublished,
)
from rollout_sched.metrics.fold import Handler
from rollout_sched.metrics.folded import Folded
from rollout_sched.page.attempt_tables import AttemptTables
from rollout_sched.page.fleet_levels import FleetLevels
from rollout_sched.page.run_record import RunRecord, quantiles


class RunFold:
    """Gathers a RunRecord.

    `waiting`: returns how many requests wait for an instance now.
    """

    def __init__(self, waiting: Callable[[], int] = lambda: 0) -> None:
        self._waiting = waiting
        self._now = 0.0
        self._attempts = AttemptTables()
        self._fleet = FleetLevels()
        self._marks: list[tuple[float, str, str]] = []
        self._lengths = array("I")
        self._folded = Folded(*self._attempts.folds, self)

    def observe(self, now: float, event: Event, actions: Iterable[Action]) -> None:
        """Take the next entry of the journal and the actions of the scheduler."""
        self._now = now
        self._folded.observe(now, event, actions)
        self._fleet.set(now, self._attempts.in_flight, self._waiting())

    def record(self, end_s: float, curves: list[list[float]]) -> RunRecord:
        """The record of a run that ended at `end_s`, or at the last event if that is later;
        `curves` are those of its steps (see `Metrics`)."""
        end_s = max(end_s, self._now)
        return RunRecord(
            end_s=end_s,
            instances=list(self._attempts.instances),
            groups=list(self._attempts.groups),
            **self._attempts.columns(end_s),
            fleet=self._fleet.told(end_s),
            marks=self._marks,
            lengths=quantiles(self._lengths),
            curves=curves,
        )

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            Deliver: self._delivered,
            InstanceJoined: self._joined,
            InstanceLost: self._lost,
            InstanceReported: self._fleet.report,
            WeightsPublished: self._published,
            Restored: self._restored,
        }

    def _joined(self, now: float, event: InstanceJoined) -> None:
        if now > 0:
            self._marks.append((now, "joined", f"{event.instance} joined"))
        self._attempts.instance(event.instance)
        self._fleet.gone(event.instance)

    def _lost(self, now: float, event: InstanceLost) -> None:
        if event.asked:
            self._marks.append((now, "left", f"{event.instance} was {event.reason}"))
        else:
            self._marks.append((now, "lost", f"{event.instance} was lost: {event.reason}"))
        self._fleet.gone(event.instance)

    def _published(self, now: float, event: WeightsPublished) -> None:
        self._marks.append((now, "published", f"version {event.version} published"))

    def _delivered(self, now: float, action: Deliver) -> None:
        self._lengths.extend([sample.response_tokens for sample in action.samples])
        if action.last:
            self._marks.append((now, "delivered", f"batch {action.batch} delivered"))

    def _restored(self, now: float, event: Restored) -> None:
        self._marks.append((now, "restarted", "the scheduler restarted"))
