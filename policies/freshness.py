"""Freshness: how old a delivered sample may be, and what happens when one grows too old."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from rollout_sched.core.model.records import MAX_SIZE
from rollout_sched.core.model.roles import Freshness, Progress


class Unbounded(Freshness, msgspec.Struct, frozen=True):
    """Any age is allowed; only the batching bounds what is in flight."""

    def room(self, progress: Progress) -> int:
        return progress.fresh + progress.deferred

    def oldest_allowed(self, version: int) -> int:
        return 0

    def must_wait(self, progress: Progress, remaining: Mapping[int, int], places: int) -> bool:
        return False


class Paced(Freshness, msgspec.Struct, frozen=True):
    """A bounded number of groups between two weight updates, including those still in flight.

    verl's fully async mode: with B groups a batch (its require_batches * ppo_mini_batch_size), at
    most (1 + staleness_threshold) * trigger_parameter_sync_step * B groups are in flight or have
    gone to the trainer since the fleet got its weights, version f: (i + 1 - f) * B less the p
    places that are left in the batch of the trainer's version i. That is the pacing of `Bounded`
    with S = (1 + threshold) * trigger - 1, where a fraction of a batch is allowed. It bounds the
    aggregate, not each sample. The weights role must update at the same interval: `every` =
    trigger_parameter_sync_step.
    """

    staleness_threshold: Annotated[float, msgspec.Meta(ge=0, le=MAX_SIZE)] = 0.1
    trigger_parameter_sync_step: Annotated[int, msgspec.Meta(ge=1)] = 1

    def room(self, progress: Progress) -> int:
        size = progress.prompts_per_step
        most = (1 + self.staleness_threshold) * self.trigger_parameter_sync_step * size
        gone = (progress.version + 1 - progress.fleet_version) * size - progress.open_places
        return int(most + 1e-9) - gone - progress.started

    def oldest_allowed(self, version: int) -> int:
        return 0

    def must_wait(self, progress: Progress, remaining: Mapping[int, int], places: int) -> bool:
        return False


class Bounded(Freshness, msgspec.Struct, frozen=True):
    """No delivered sample holds a token more than `max_staleness` versions old.

    Admission is paced: with B groups a batch, S the bound, i the trainer's version, p the places
    that are left in its batch and f the oldest version in the fleet, at most (f + S - i) * B + p
    groups are open. (If every version takes one batch, that is AReaL's formula, arXiv 2505.24298:
    at most (f + S + 1) * B groups are ever launched.) Pacing by itself bounds only the aggregate:
    other groups can still overtake a long sample until it is too old.

    when_stale = "wait" makes the bound hold for each sample without throwing any away. A group of
    oldest version v is due at trainer version v + S. A batch, or a part of it, is delivered only if
    the groups that stay behind can still be delivered in time (the reservation idea of StaleFlow,
    arXiv 2601.12784). There are p places left at version i, 0 once the batch is whole, and B at
    each later version, so they can if and only if

        for every v: L(v) <= (v + S - i) * B + p,    L(v): open groups of version v or older.

    That always holds, so no sample is too old and no group waits for ever:

    * At the start no group is open.
    * A launch makes groups of version f or newer, and the pacing is the bound for v = f, which
      grows with v.
    * A part of the batch is delivered only if the bound holds afterwards.
    * New weights come when the batch is whole, p = 0; i + 1 with p = B is the same bound. That is
      why no weights may be published while a batch is delivered in part.
    * Groups go oldest first. If even the oldest complete one, of version a, must wait, there is a
      v < a with L(v) = (v + S - i) * B + p >= 1, and all of these groups are unfinished: the batch
      waits for them, and when they are complete they are the oldest.

    A later place serves older groups no better, so each additional delivered group only tightens
    the bound: the groups that may go are a leading part of this order.

    when_stale = "drop" never waits: a group that has become too old starts over, which costs tokens
    and starves long answers (tinker-cookbook PR 822: 105 group rollouts burned).

    when_stale = "mask" never waits either, and throws nothing away: tokens that are too old are
    context and are not trained (their response_mask is 0, as partial rollout masks off-policy
    segments in Kimi k1.5, arXiv 2501.12599). The bound holds for every token that is trained.
    """

    max_staleness: Annotated[int, msgspec.Meta(ge=0)] = 0
    when_stale: Literal["wait", "drop", "mask"] = "wait"

    @property
    def masks(self) -> bool:
        return self.when_stale == "mask"

    def room(self, progress: Progress) -> int:
        batches = progress.fleet_version + self.max_staleness - progress.version
        return batches * progress.prompts_per_step + progress.open_places - progress.started

    def oldest_allowed(self, version: int) -> int:
        return version - self.max_staleness

    def must_wait(self, progress: Progress, remaining: Mapping[int, int], places: int) -> bool:
        if self.when_stale != "wait":
            return False
        left = 0
        for oldest in sorted(remaining):
            left += remaining[oldest]
            batches = oldest + self.max_staleness - progress.version
            if left > batches * progress.prompts_per_step + places:
                return True
        return False
