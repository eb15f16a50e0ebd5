"""Freshness: how old a delivered sample may be, and what gives when one grows too old."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from rollout_sched.core.roles import Progress


class Unbounded(msgspec.Struct, frozen=True):
    """Any age will do; what is in flight is bounded by the batching alone."""

    def room(self, progress: Progress) -> int:
        return progress.fresh + progress.deferred

    def oldest_allowed(self, version: int) -> int:
        return 0

    def must_wait(self, progress: Progress, remaining: Mapping[int, int]) -> bool:
        return False


class Budget(msgspec.Struct, frozen=True):
    """So many groups may start between two weight updates, those still under way included.

    verl's fully async mode: with B groups a batch (its require_batches * ppo_mini_batch_size), at
    most (1 + staleness_threshold) * trigger_parameter_sync_step * B are under way or have come
    since the fleet got its weights. With f the oldest version in the fleet, f * B had been
    delivered then, which makes it AReaL's formula with (1 + threshold) * trigger - 1 for the bound
    S, a fraction of a batch allowed. It bounds the aggregate, not each sample. The weights role has
    to update as seldom: `every` = trigger_parameter_sync_step.
    """

    staleness_threshold: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    trigger_parameter_sync_step: Annotated[int, msgspec.Meta(ge=1)] = 4

    def room(self, progress: Progress) -> int:
        size = progress.prompts_per_step
        most = (1 + self.staleness_threshold) * self.trigger_parameter_sync_step * size
        ever = progress.fleet_version * size + int(most + 1e-9)
        return ever - progress.delivered - progress.started

    def oldest_allowed(self, version: int) -> int:
        return 0

    def must_wait(self, progress: Progress, remaining: Mapping[int, int]) -> bool:
        return False


class Bounded(msgspec.Struct, frozen=True):
    """No delivered sample holds a token more than `max_staleness` versions old.

    Admission is paced (AReaL, arXiv 2505.24298): with B groups a batch, S the bound and f the
    oldest version in the fleet, at most (f + S + 1) * B groups are ever launched. That alone
    bounds the aggregate; a long sample can still be overtaken until it is too old.

    on_excess = "wait" makes the bound hold for each sample without throwing any away. A group of
    oldest version v is due at trainer version v + S. A batch at version i may go only if what stays
    behind can still go in time: for every v, at most (v + S - i) * B groups of version v or older.
    Batches take the oldest first, so pacing guarantees that such a batch always comes (the
    reservation idea of StaleFlow, arXiv 2601.12784). on_excess = "drop" never waits: a group that
    has become too old starts over, which costs tokens and starves long answers
    (tinker-cookbook PR 822: 105 group rollouts burned).
    """

    max_staleness: Annotated[int, msgspec.Meta(ge=0)] = 0
    on_excess: Literal["wait", "drop"] = "wait"

    def room(self, progress: Progress) -> int:
        ever = (progress.fleet_version + self.max_staleness + 1) * progress.prompts_per_step
        return ever - progress.delivered - progress.started

    def oldest_allowed(self, version: int) -> int:
        return version - self.max_staleness

    def must_wait(self, progress: Progress, remaining: Mapping[int, int]) -> bool:
        if self.on_excess == "drop":
            return False
        left = 0
        for oldest in sorted(remaining):
            left += remaining[oldest]
            batches = oldest + self.max_staleness - progress.version
            if left > batches * progress.prompts_per_step:
                return True
        return False
