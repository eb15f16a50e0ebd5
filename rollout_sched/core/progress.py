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

    dirty        something has changed since the group-level roles were last asked
    takes_parts  the trainer takes the present batch in parts
    shares_gpus  the trainer takes instances that are lent to it
    parts        of the present batch that have gone
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
        self.takes_parts = False
        self.parts = 0
        self.in_batch = 0
        self._whole_at: int | None = None  # the version that took the last whole batch
        self.round: Launch | None = None
        self._fleet = fleet
        self._groups = groups
        self._samples = samples

    def part_delivered(self, groups: int) -> None:
        self.delivered += groups
        self.in_batch += groups
        self.parts += 1

    def batch_delivered(self) -> None:
        """Its last part has gone."""
        self.batches += 1
        self.parts = self.in_batch = 0
        self._whole_at = self.version
        self.trainer_waiting = False
        self.round = None

    @property
    def missing(self) -> int:
        missing = self.prompts_per_step - self.in_batch
        if self.closed:
            missing = min(missing, self.complete + self.active + self.deferred + self.fresh)
        return missing

    @property
    def on_the_way(self) -> int:
        return self.in_batch + self.complete + self.active

    @property
    def places(self) -> int:
        return 0 if self._whole_at == self.version else self.prompts_per_step - self.in_batch

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
