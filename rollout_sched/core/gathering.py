"""After a restart, no work is sent until the fleet has gathered: else the first gets all of it.

All requests of the earlier scheduler wait then. The instances join again one after the other,
within moments, and some must load weights first. So nothing is dispatched until as many instances
are here and ready as before, or until a time limit: an instance may be gone for good.
"""

from __future__ import annotations

from rollout_sched.core.actions import Action, Wake
from rollout_sched.core.fleet import Fleet
from rollout_sched.core.progress import RunProgress

#: Seconds. An instance that is up needs only a fraction of it to join.
PATIENCE_S = 5.0


class Gathering:
    """`expected`: number of instances that are waited for; 0 when not gathering."""

    def __init__(self, fleet: Fleet, progress: RunProgress, out: list[Action]) -> None:
        self.expected = 0
        self._until = 0.0
        self._fleet = fleet
        self._progress = progress
        self._out = out

    def begin(self, instances: int, now: float) -> None:
        """Begin to wait for as many instances as were here before."""
        if instances:
            self.expected = instances
            self._until = now + PATIENCE_S
            self._out.append(Wake(self._until))

    def holds(self, now: float) -> bool:
        """Whether work must still wait for more instances; ask only while some are expected."""
        missing = len(self._fleet.instances) < self.expected or self._progress.updating > 0
        if missing and now < self._until:
            return True
        self.expected = 0
        return False
