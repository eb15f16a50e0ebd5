"""After a restart the fleet gathers before work is sent: else whoever joins first gets all of it.

What ran on a fleet waits then, and its instances join again one after the other, within moments,
some of them with weights to be loaded first. So nothing is dispatched until as many are here, and
ready, as were before, or for so long at most: one may be gone for good.
"""

from __future__ import annotations

from rollout_sched.core.actions import Action, Wake
from rollout_sched.core.fleet import Fleet
from rollout_sched.core.progress import RunProgress

#: Seconds, of which an instance that is up needs a fraction.
PATIENCE_S = 5.0


class Gathering:
    """`expected`: instances that are waited for; 0 at any other time."""

    def __init__(self, fleet: Fleet, progress: RunProgress, out: list[Action]) -> None:
        self.expected = 0
        self._until = 0.0
        self._fleet = fleet
        self._progress = progress
        self._out = out

    def begin(self, instances: int, now: float) -> None:
        """So many were here before."""
        if instances:
            self.expected = instances
            self._until = now + PATIENCE_S
            self._out.append(Wake(self._until))

    def holds(self, now: float) -> bool:
        """Whether those that are here wait for others still; to be asked while any are expected."""
        missing = len(self._fleet.instances) < self.expected or self._progress.updating > 0
        if missing and now < self._until:
            return True
        self.expected = 0
        return False
