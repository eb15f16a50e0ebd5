"""How the instances spend their time, sampled with every poll and every order to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from rollout_sched.core.actions import Lend, Pause, Resume, UpdateWeights
from rollout_sched.core.events import (
    GateClosed,
    GateOpened,
    InstanceJoined,
    InstanceLost,
    InstancePaused,
    InstanceReported,
    InstanceReturned,
    Restored,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.metrics.fold import Handler


class FleetTimes:
    """Instance-seconds by state, as `state_of` names that of an instance ("" if it is not here).

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
