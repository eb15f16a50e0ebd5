"""Describes the latest changes in a live run as text."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollout_sched.core.actions import Deliver, Pause
from rollout_sched.core.events import (
    InstanceJoined,
    InstanceLost,
    RequestFailed,
    Restored,
    Retuned,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.metrics.fold import Handler

#: How many changes are kept.
CHANGES = 50


class LoggedChange(NamedTuple):
    """level: "info", "warning" or "error"; kind: a word for the type of change."""

    at: float
    level: str
    kind: str
    text: str


class ChangeLog:
    """Folds the notable changes; `last` has the latest ones, the newest at the end."""

    def __init__(self) -> None:
        self.last: deque[LoggedChange] = deque(maxlen=CHANGES)

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            Deliver: self._delivered,
            InstanceJoined: self._joined,
            InstanceLost: self._lost,
            Pause: self._paused,
            RequestFailed: self._failed,
            WeightsPublished: self._published,
            WeightsUpdated: self._updated,
            Restored: self._restored,
            Retuned: self._retuned,
        }

    def _note(self, now: float, level: str, kind: str, text: str) -> None:
        self.last.append(LoggedChange(now, level, kind, text))

    def _joined(self, now: float, event: InstanceJoined) -> None:
        self._note(now, "info", "joined", f"{event.instance} joined with version {event.version}")

    def _lost(self, now: float, event: InstanceLost) -> None:
        if event.asked:
            self._note(now, "info", "left", f"{event.instance} was {event.reason}")
        else:
            self._note(now, "error", "lost", f"{event.instance} was lost: {event.reason}")

    def _paused(self, now: float, action: Pause) -> None:
        self._note(now, "info", "paused", f"{action.instance} is paused ({action.mode})")

    def _published(self, now: float, event: WeightsPublished) -> None:
        self._note(now, "info", "published", f"version {event.version} published")

    def _updated(self, now: float, event: WeightsUpdated) -> None:
        self._note(now, "info", "updated", f"{event.instance} has version {event.version}")

    def _restored(self, now: float, event: Restored) -> None:
        self._note(now, "warning", "restarted", "the scheduler continues an earlier run")

    def _retuned(self, now: float, event: Retuned) -> None:
        said = ", ".join(
            f"{role}.{name} = {value}"
            for role, parameters in event.parameters.items()
            for name, value in parameters.items()
        )
        self._note(now, "info", "retuned", f"policy parameters changed: {said}")

    def _failed(self, now: float, event: RequestFailed) -> None:
        self._note(
            now, "warning", "failed", f"an attempt of {event.request} failed: {event.reason}"
        )

    def _delivered(self, now: float, action: Deliver) -> None:
        if action.last:
            self._note(now, "info", "delivered", f"batch {action.batch} delivered")
