"""How long new weights take to reach one instance and all instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollout_sched.core.actions import UpdateWeights
from rollout_sched.core.events import (
    InstanceJoined,
    InstanceLost,
    Restored,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.metrics.fold import Handler
from rollout_sched.metrics.histogram import SECONDS, Histogram

#: Called with a version, the number of instances that have it, and seconds since its publication.
OnLoaded = Callable[[int, int, float], object]


class WeightTimes:
    """load   seconds from the order to load weights until an instance reports that it has them
    sync   seconds from a publication until every current instance has the version

    `on_loaded` is called when every instance has it.
    """

    def __init__(self, on_loaded: OnLoaded | None = None) -> None:
        self.load = Histogram(SECONDS)
        self.sync = Histogram(SECONDS)
        self._on_loaded = on_loaded
        self._ordered: dict[str, float] = {}
        self._versions: dict[str, int] = {}
        self._published: tuple[int, float] | None = None  # version and time, until all have it

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            InstanceJoined: self._joined,
            InstanceLost: self._lost,
            Restored: self._restored,
            WeightsPublished: self._publish,
            UpdateWeights: self._order,
            WeightsUpdated: self._updated,
        }

    def _joined(self, now: float, event: InstanceJoined) -> None:
        self._versions[event.instance] = event.version
        self._ordered.pop(event.instance, None)

    def _lost(self, now: float, event: InstanceLost) -> None:
        self._versions.pop(event.instance, None)
        self._ordered.pop(event.instance, None)
        self._look(now)

    def _restored(self, now: float, event: Restored) -> None:
        """The instances join again."""
        self._versions.clear()
        self._ordered.clear()

    def _publish(self, now: float, event: WeightsPublished) -> None:
        if self._published is None or self._published[0] < event.version:
            self._published = event.version, now

    def _order(self, now: float, action: UpdateWeights) -> None:
        self._ordered[action.instance] = now

    def _updated(self, now: float, event: WeightsUpdated) -> None:
        since = self._ordered.pop(event.instance, None)
        if since is not None:
            self.load.add(now - since)
        if event.instance in self._versions:
            self._versions[event.instance] = event.version
        self._look(now)

    def _look(self, now: float) -> None:
        if self._published is None or not self._versions:
            return
        version, at = self._published
        if min(self._versions.values()) < version:
            return
        self._published = None
        self.sync.add(now - at)
        if self._on_loaded is not None:
            self._on_loaded(version, len(self._versions), now - at)
