"""Weight updates, per instance, in an order that neither blocks nor kills requests.

The gate closes first (an instance that is not SERVING takes nothing new), then running requests
drain, freeze or come back, then the weights are loaded, then the gate opens:

    SERVING -> DRAINING ----------> UPDATING -> GATED -> SERVING      at_update = "drain"
    SERVING -> PAUSING -> (paused)  UPDATING -> GATED -> SERVING      "in_place", "resubmit"
    SERVING -> DRAINING ----------> UPDATING -> GATED -> SERVING      "resubmit" that waits for
                                                         responses that cannot be resumed
    SERVING ----------------------> UPDATING -> GATED -> SERVING      nothing in flight

If the trainer brings the weights itself (`loads` is False), the scheduler orders nothing: the new
version is *found* on one instance after the other.

Instances whose updates began together form a *cohort* and open together, unless the weights role
says `reopen = "alone"`. If each opens as soon as it is ready, the first one gets all waiting
requests. Frozen requests go on without waiting for the cohort.

When instances were opened one by one, policies without admission sent the whole queue to the first
that was ready (in a replay, 512 of 512 requests to one of eight instances).
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout_sched.core.errors import PolicyError
from rollout_sched.core.model.actions import Pause, Resume, UpdateWeights
from rollout_sched.core.model.model import Instance, InstanceStatus
from rollout_sched.core.state.state import State


class _Cohort:
    """Instances updated together, and the ids of those that are not ready yet."""

    def __init__(self, members: Sequence[Instance]) -> None:
        self.members = tuple(members)
        self.waiting = {member.id for member in members}


class WeightUpdater:
    """Brings every instance to the newest published version (`RunProgress.version`), if it is ours
    to load (`RunProgress.loads`)."""

    def __init__(self, state: State) -> None:
        self.outdated: dict[str, Instance] = {}
        self._paused: dict[str, Instance] = {}
        self._cohorts: dict[str, _Cohort] = {}
        self._state = state

    def published(self) -> None:
        """A new version, or the newest one once more, now as ours to load: then instances that do
        not have it get it."""
        progress = self._state.progress
        if not progress.loads:
            self.outdated.clear()
            return
        for instance in self._state.fleet.instances.values():
            ready = instance.status in (InstanceStatus.SERVING, InstanceStatus.GATED)
            if ready and instance.version < progress.version:
                self.outdated[instance.id] = instance

    def joined(self, instance: Instance) -> None:
        """An instance that joins with old weights is updated before it serves."""
        if self._lacks_ours(instance):
            self._gather([instance])
            self._load(instance)

    def lost(self, instance: Instance) -> None:
        self.outdated.pop(instance.id, None)
        self._paused.pop(instance.id, None)
        instance.status = InstanceStatus.LOST
        self._ready(instance)
        self._cohorts.pop(instance.id, None)

    def start(self) -> list[Instance]:
        """Start the updates that the weights role asks for. Returns the instances whose requests
        come back: a PAUSING one was told to abort them all; of a DRAINING one the caller interrupts
        those that can be resumed."""
        state = self._state
        chosen = state.roles.weights.choose(tuple(self.outdated.values()), state.progress)
        for instance in chosen:
            if self.outdated.get(instance.id) is not instance:
                raise PolicyError(f"weights chose {instance!r}, which needs no update")
        if state.roles.weights.reopen == "alone":
            for instance in chosen:
                self._gather([instance])
        elif chosen:
            self._gather(chosen)
        return [instance for instance in chosen if self._begin(instance)]

    def paused(self, instance: Instance) -> bool:
        """False if this instance was not told to pause."""
        if instance.status is not InstanceStatus.PAUSING:
            return False
        self._paused[instance.id] = instance
        self._load(instance)
        return True

    def emptied(self, instance: Instance) -> bool:
        """The last attempt in flight has answered; True if the weights can now be loaded."""
        if instance.status is not InstanceStatus.DRAINING:
            return False
        self._load(instance)
        return True

    def updated(self, instance: Instance, version: int) -> bool:
        """False if no update of this instance was in progress."""
        if instance.status is not InstanceStatus.UPDATING:
            return False
        self._state.fleet.set_version(instance, version)
        if self._paused.pop(instance.id, None) is not None:
            self._state.orders.append(Resume(instance.id))
        self._set_status(instance, InstanceStatus.GATED)
        if self._lacks_ours(instance):
            self.outdated[instance.id] = instance
        self._ready(instance)
        return True

    def found(self, instance: Instance, version: int) -> bool:
        """Another party has loaded this version. False if it is not newer: versions only grow, and
        an instance that returns with older weights was lost before."""
        if version <= instance.version:
            return False
        self._state.fleet.set_version(instance, version)
        if version == self._state.progress.version:
            self.outdated.pop(instance.id, None)
        return True

    def _lacks_ours(self, instance: Instance) -> bool:
        """Whether the instance lacks the newest version, and we are to load it."""
        progress = self._state.progress
        return progress.loads and instance.version < progress.version

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

    def _begin(self, instance: Instance) -> bool:
        del self.outdated[instance.id]
        interruption = self._state.roles.interruption
        how = interruption.at_update
        waits = interruption.unresumable == "finish" and _has_unresumable(instance)
        if not instance.attempts:
            self._load(instance)
            return False
        if how == "drain" or (how == "resubmit" and waits):
            self._set_status(instance, InstanceStatus.DRAINING)
        else:
            self._set_status(instance, InstanceStatus.PAUSING)
            clear = not interruption.keeps_kv
            self._state.orders.append(
                Pause(instance.id, "keep" if how == "in_place" else "abort", clear)
            )
        return how == "resubmit"

    def _load(self, instance: Instance) -> None:
        state, version = self._state, self._state.progress.version
        if not state.progress.loads:
            self._leave_as_it_is(instance)
            return
        self._set_status(instance, InstanceStatus.UPDATING)
        if not instance.attempts:
            # It holds no work, so it will never generate with its present weights again.
            state.fleet.set_version(instance, version)
        state.orders.append(UpdateWeights(instance.id, version))

    def _leave_as_it_is(self, instance: Instance) -> None:
        """The instance was stopped for weights that we no longer load."""
        if self._paused.pop(instance.id, None) is not None:
            self._state.orders.append(Resume(instance.id))
        self._set_status(instance, InstanceStatus.GATED)
        self._ready(instance)

    def _set_status(self, instance: Instance, status: InstanceStatus) -> None:
        instance.status = status
        self._state.fleet.touch(instance)


def _has_unresumable(instance: Instance) -> bool:
    """Whether it runs a response that would start over if it were cut."""
    return any(
        not attempt.request.resumable
        for attempt in instance.attempts.values()
        if not attempt.abandoned
    )
