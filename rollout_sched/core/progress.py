"""How far the run is: the queues of groups and the counters that batching policies read."""

from __future__ import annotations

from collections import deque

from rollout_sched.core.fleet import Fleet
from rollout_sched.core.model import Group, InstanceStatus
from rollout_sched.core.roles import Launch
from rollout_sched.core.sample_buffer import SampleBuffer

DRAINING, PAUSING, UPDATING = (
    InstanceStatus.DRAINING,
    InstanceStatus.PAUSING,
    InstanceStatus.UPDATING,
)


class RunProgress:
    """The scheduler's own `Progress`: facts that live elsewhere are read there."""

    def __init__(
        self, prompts_per_step: int, version: int, fleet: Fleet, samples: SampleBuffer
    ) -> None:
        self.prompts_per_step = prompts_per_step
        self.version = version
        self.trainer_waiting = False
        self.closed = False
        self.active = 0
        self.delivered = 0
        self.batches = 0
        self.round: Launch | None = None
        self.fresh_groups: deque[Group] = deque()
        self.deferred_groups: dict[str, Group] = {}
        self._fleet = fleet
        self._samples = samples

    @property
    def fresh(self) -> int:
        return len(self.fresh_groups)

    @property
    def deferred(self) -> int:
        return len(self.deferred_groups)

    @property
    def complete(self) -> int:
        return self._samples.complete

    @property
    def held(self) -> int:
        return self._samples.held

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
