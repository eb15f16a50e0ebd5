"""How far the run is: what batching, freshness and weights policies read."""

from __future__ import annotations

from rollout_sched.core.fleet import Fleet
from rollout_sched.core.groups import ACTIVE, DEFERRED, FRESH, SPENT, Groups
from rollout_sched.core.model import InstanceStatus
from rollout_sched.core.roles import Launch
from rollout_sched.core.sample_buffer import SampleBuffer

DRAINING, PAUSING, UPDATING = (
    InstanceStatus.DRAINING,
    InstanceStatus.PAUSING,
    InstanceStatus.UPDATING,
)


class RunProgress:
    """The scheduler's own `Progress`: what the trainer said, and views of what lives elsewhere.

    `shares_gpus`: the trainer takes instances that are lent to it.
    `dirty`: something has changed since the group-level roles were last asked.
    """

    def __init__(
        self,
        prompts_per_step: int,
        version: int,
        fleet: Fleet,
        groups: Groups,
        samples: SampleBuffer,
    ) -> None:
        self.prompts_per_step = prompts_per_step
        self.version = version
        self.trainer_waiting = False
        self.shares_gpus = False
        self.closed = False
        self.dirty = False
        self.delivered = 0
        self.batches = 0
        self.round: Launch | None = None
        self._fleet = fleet
        self._groups = groups
        self._samples = samples

    @property
    def fresh(self) -> int:
        return self._groups.count(FRESH)

    @property
    def active(self) -> int:
        return self._groups.count(ACTIVE)

    @property
    def spent(self) -> int:
        return self._groups.count(SPENT)

    @property
    def deferred(self) -> int:
        return self._groups.count(DEFERRED)

    @property
    def complete(self) -> int:
        return self._samples.complete

    @property
    def started(self) -> int:
        return self._samples.started

    @property
    def fleet_version(self) -> int:
        version = self._fleet.version
        return self.version if version is None else version

    @property
    def updating(self) -> int:
        under_way = (DRAINING, PAUSING, UPDATING)
        return sum(i.status in under_way for i in self._fleet.instances.values())

    @property
    def update_pending(self) -> bool:
        return self.fleet_version < self.version
