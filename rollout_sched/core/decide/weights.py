"""Weight updates, per instance, in an order that neither blocks nor kills requests.

The gate closes first (an instance that is not SERVING takes nothing new), then running requests
drain, freeze or come back, then the weights are loaded, then the gate opens:

    SERVING -> DRAINING ----------> UPDATING -> GATED -> SERVING      at_update = "drain"
    SERVING -> PAUSING -> (paused)  UPDATING -> GATED -> SERVING      "in_place", "resubmit"
    SERVING ----------------------> UPDATING -> GATED -> SERVING      nothing in flight

If the trainer brings the weights itself (`loads` is False), the scheduler orders nothing: the new
version is *found* on one instance after the other.

Instances whose updates began together form a *cohort* and open together. If each opened as soon as
it was ready, the first one would get all waiting requests. Frozen requests go on without waiting
for the cohort.

When instances were opened one by one, policies without admission sent the whole queue to the first
that was ready (in a replay, 512 of 512 requests to one of eight instances).
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout_sched.core.model.actions import Action, Pause, Resume, UpdateWeights
from rollout_sched.core.model.errors import PolicyError
from rollout_sched.core.model.model import Instance, InstanceStatus
from rollout_sched.core.model.roles import Interruption, Progress, Weights
from rollout_sched.core.state.fleet import Fleet


class _Cohort:
    """Instances updated together, and the ids of those that are not ready yet."""

    def __init__(self, members: Sequence[Instance]) -> None:
        self.members = tuple(members)
        self.waiting = {member.id for member in members}


class WeightUpdater:
    """Brings every instance to the newest published version.

    loads  the newest version is ours to load
    """

    def __init__(
        self, fleet: Fleet, weights: Weights, interruption: Interruption, version: int
    ) -> None:
        self.version = version
        self.loads = True
        self.outdated: dict[str, Instance] = {}
        self._paused: dict[str, Instance] = {}
        self._cohorts: dict[str, _Cohort] = {}
        self._fleet = fleet
        self._weights = weights
        self._interruption = interruption

    def publish(self, version: int, *, loads: bool = True) -> None:
        """`loads` as in WeightsPublished. The newest version may be published again with `loads`:
        then instances that do not have it get it."""
        self.version = version
        self.loads = loads
        if not loads:
            self.outdated.clear()
            return
        for instance in self._fleet.instances.values():
            ready = instance.status in (InstanceStatus.SERVING, InstanceStatus.GATED)
            if ready and instance.version < version:
                self.outdated[instance.id] = instance

    def joined(self, instance: Instance, out: list[Action]) -> None:
        """An instance that joins with old weights is updated before it serves."""
        if self.loads and instance.version < self.version:
            self._gather([instance])
            self._load(instance, out)

    def lost(self, instance: Instance) -> None:
        self.outdated.pop(instance.id, None)
        self._paused.pop(instance.id, None)
        instance.status = InstanceStatus.LOST
        self._ready(instance)
        self._cohorts.pop(instance.id, None)

    def start(self, progress: Progress, out: list[Action]) -> list[Instance]:
        """Start the updates the weights role asks for; returns the instances told to abort."""
        chosen = self._weights.choose(tuple(self.outdated.values()), progress)
        for instance in chosen:
            if self.outdated.get(instance.id) is not instance:
                raise PolicyError(f"weights chose {instance!r}, which needs no update")
        if chosen:
            self._gather(chosen)
        return [instance for instance in chosen if self._begin(instance, out)]

    def paused(self, instance: Instance, out: list[Action]) -> bool:
        """False if this instance was not told to pause."""
        if instance.status is not InstanceStatus.PAUSING:
            return False
        self._paused[instance.id] = instance
        self._load(instance, out)
        return True

    def emptied(self, instance: Instance, out: list[Action]) -> bool:
        """The last attempt in flight has answered; True if the weights can now be loaded."""
        if instance.status is not InstanceStatus.DRAINING:
            return False
        self._load(instance, out)
        return True

    def updated(self, instance: Instance, version: int, out: list[Action]) -> bool:
        """False if no update of this instance was in progress."""
        if instance.status is not InstanceStatus.UPDATING:
            return False
        self._fleet.set_version(instance, version)
        if self._paused.pop(instance.id, None) is not None:
            out.append(Resume(instance.id))
        self._set_status(instance, InstanceStatus.GATED)
        if self.loads and version < self.version:
            self.outdated[instance.id] = instance
        self._ready(instance)
        return True

    def found(self, instance: Instance, version: int) -> bool:
        """Another party has loaded this version. False if it is not newer: versions only grow, and
        an instance that returns with older weights was lost before."""
        if version <= instance.version:
            return False
        self._fleet.set_version(instance, version)
        if version == self.version:
            self.outdated.pop(instance.id, None)
        return True

    def _gather(self, instances: Sequence[Instance]) -> None:
        """Make a cohort; an instance that still waits in another cohort leaves that one."""
        cohort = _Cohort(instances)
        for instance in instances:
            before = self._cohorts.get(instance.id)
            self._cohorts[instance.id] = cohort
            if before is not None:
                self._leave(before, instance)

    def _ready(self, instance: Instance) -> None:
        cohort = self._cohorts.get(instance.id)
        if cohort is not None:
            self._leave(cohort, instance)

    def _leave(self, cohort: _Cohort, instance: Instance) -> None:
        """The last instance to be ready opens the gate for all that are still in the cohort."""
        cohort.waiting.discard(instance.id)
        if cohort.waiting:
            return
        for member in cohort.members:
            if self._cohorts.get(member.id) is cohort:
                del self._cohorts[member.id]
                if member.status is InstanceStatus.GATED:
                    self._set_status(member, InstanceStatus.SERVING)

    def _begin(self, instance: Instance, out: list[Action]) -> bool:
        del self.outdated[instance.id]
        how = self._interruption.at_update
        if not instance.attempts:
            self._load(instance, out)
        elif how == "drain":
            self._set_status(instance, InstanceStatus.DRAINING)
        else:
            self._set_status(instance, InstanceStatus.PAUSING)
            clear = not self._interruption.keeps_kv
            out.append(Pause(instance.id, "keep" if how == "in_place" else "abort", clear))
        return instance.status is InstanceStatus.PAUSING and how == "resubmit"

    def _load(self, instance: Instance, out: list[Action]) -> None:
        if not self.loads:
            self._leave_as_it_is(instance, out)
            return
        self._set_status(instance, InstanceStatus.UPDATING)
        if not instance.attempts:
            # It holds no work, so it will never generate with its present weights again.
            self._fleet.set_version(instance, self.version)
        out.append(UpdateWeights(instance.id, self.version))

    def _leave_as_it_is(self, instance: Instance, out: list[Action]) -> None:
        """The instance was stopped for weights that we no longer load."""
        if self._paused.pop(instance.id, None) is not None:
            out.append(Resume(instance.id))
        self._set_status(instance, InstanceStatus.GATED)
        self._ready(instance)

    def _set_status(self, instance: Instance, status: InstanceStatus) -> None:
        instance.status = status
        self._fleet.touch(instance)
