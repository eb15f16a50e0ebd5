"""How far the run is: what the batching, freshness and weights policies read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rollout_sched.core.model.model import Group, InstanceStatus
from rollout_sched.core.model.records import DeliveredGroup, Launch, RunFacts
from rollout_sched.core.model.roles import Capacity
from rollout_sched.core.state.fleet import Fleet
from rollout_sched.core.state.groups import (
    ACTIVE,
    COMPLETE,
    DEFERRED,
    FRESH,
    JUDGING,
    SPENT,
    Groups,
    SampleBuffer,
)

DRAINING, PAUSING, UPDATING = (
    InstanceStatus.DRAINING,
    InstanceStatus.PAUSING,
    InstanceStatus.UPDATING,
)

#: Batches whose groups are remembered. A cycle of rounds with an eighth more prompts has nine.
RECENT_BATCHES = 12


class RunProgress:
    """The scheduler's `Progress`: what the trainer said, and values read from the other state.

    loads        the newest version is ours to load (see WeightsPublished)
    must_decide  something has changed since the group-level roles were last asked
    takes_parts  the trainer takes the current batch in parts
    shares_gpus  the trainer takes instances that are lent to it
    parts        parts of the current batch that were delivered
    whole_at     the version that took the last whole batch
    lost         groups that the round has lost and that are not made up for yet
    """

    def __init__(
        self,
        prompts_per_step: int,
        version: int,
        fleet: Fleet,
        groups: Groups,
        samples: SampleBuffer,
        *,
        keeps_recent: bool = False,
    ) -> None:
        self.prompts_per_step = prompts_per_step
        self.version = version
        self.loads = True
        self.trainer_waiting = False
        self.shares_gpus = False
        self.closed = False
        self.must_decide = False
        self.delivered = 0
        self.batches = 0
        self.takes_parts = False
        self.parts = 0
        self.in_batch = 0
        self.whole_at: int | None = None
        self.lost = 0
        self.round: Launch | None = None
        self.recent: deque[DeliveredGroup] = deque(maxlen=RECENT_BATCHES * prompts_per_step)
        self._keeps_recent = keeps_recent
        self._fleet = fleet
        self._groups = groups
        self._samples = samples

    def group_delivered(self, group: Group) -> None:
        if self._keeps_recent:
            lengths = tuple([request.response_tokens for request in group.finished])
            self.recent.append(DeliveredGroup(group.siblings.prompt_tokens, lengths))

    def group_lost(self, group: Group) -> None:
        """A group fails, is filtered or starts over: another must take its place in the round."""
        if self.round is not None and group.state in (ACTIVE, JUDGING, COMPLETE):
            self.lost += 1

    def launched(self, launch: Launch, groups: int) -> None:
        """`groups` groups of `launch` were launched: it begins a round, or makes up for groups."""
        if self.round is None:
            self.round = launch
        self.lost = max(0, self.lost - groups)

    def part_delivered(self, groups: int) -> None:
        self.delivered += groups
        self.in_batch += groups
        self.parts += 1

    def batch_delivered(self) -> None:
        """The last part of the batch was delivered."""
        self.batches += 1
        self.parts = self.in_batch = 0
        self.whole_at = self.version
        self.trainer_waiting = False
        self.lost = 0
        self.round = None

    def restore(self, run: RunFacts, recent: Iterable[DeliveredGroup]) -> None:
        """Go on from where an earlier scheduler of this run ended."""
        self.version, self.loads = run.version, run.loads
        self.trainer_waiting, self.takes_parts = run.trainer_waiting, run.takes_parts
        self.shares_gpus = run.shares_gpus
        self.closed = run.closed
        self.delivered, self.batches = run.delivered, run.batches
        self.parts, self.in_batch = run.parts, run.in_batch
        self.whole_at = run.whole_at
        self.lost = run.lost
        self.round = run.round
        if self._keeps_recent:
            self.recent.extend(recent)
        self.must_decide = True

    @property
    def missing(self) -> int:
        """Groups that the batch lacks and will get: at most all that are left, once closed."""
        return min(self.wanted, len(self._groups)) if self.closed else self.wanted

    @property
    def wanted(self) -> int:
        """Groups that the batch would still take, whether or not there are any."""
        return self.prompts_per_step - self.in_batch

    @property
    def in_progress(self) -> int:
        return self.in_batch + self.complete + self.judging + self.active

    @property
    def open_places(self) -> int:
        return 0 if self.whole_at == self.version else self.wanted

    @property
    def fresh(self) -> int:
        return self._groups.count(FRESH)

    @property
    def active(self) -> int:
        return self._groups.count(ACTIVE)

    @property
    def judging(self) -> int:
        return self._groups.count(JUDGING)

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
    def capacity(self) -> Capacity:
        instances = self._fleet.instances.values()
        return Capacity(
            len(instances),
            sum([instance.slots for instance in instances]),
            sum([instance.kv_tokens for instance in instances]),
        )

    @property
    def updating(self) -> int:
        under_way = (DRAINING, PAUSING, UPDATING)
        return sum(i.status in under_way for i in self._fleet.instances.values())

    @property
    def update_pending(self) -> bool:
        return self.fleet_version < self.version
