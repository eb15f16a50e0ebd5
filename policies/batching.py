"""Batching: when groups start, and when a batch is ready."""

from __future__ import annotations

from math import ceil
from typing import Annotated

import msgspec

from rollout_sched.core.model.records import MAX_SIZE, Launch, Times
from rollout_sched.core.model.roles import Batching, Progress
from rollout_sched.policies.estimates import RoundCost, best_over_prompts


def _fill(progress: Progress, wanted: int) -> Launch | None:
    """Launch groups until `wanted` are on the way, deferred ones first.

    None while too few groups for a batch have been submitted.
    """
    under_way = progress.in_progress
    missing = max(0, wanted - under_way)
    deferred = min(missing, progress.deferred)
    fresh = min(missing - deferred, progress.fresh)
    if under_way + deferred + fresh < progress.prompts_per_step and not progress.closed:
        return None
    return Launch(fresh=fresh, deferred=deferred)


def _make_up(progress: Progress) -> Launch | None:
    """Within a round: another group for each that it has lost, and at least enough to fill the
    batch."""
    wanted = max(progress.prompts_per_step, progress.in_progress + progress.lost)
    return _fill(progress, wanted) if progress.in_progress < wanted else None


class BatchInParts(Batching, msgspec.Struct, frozen=True, kw_only=True):
    """A batching whose batch goes once it is whole, or in parts of at least `part_prompts` groups;
    0: no parts.

    Parts go to the trainer as groups become whole, and it accumulates gradients until the batch is
    whole (StreamRL, arXiv 2504.15930, and the stream trainer of RollPacker, arXiv 2509.21009): it
    trains on the same groups, but during the tail instead of after it.
    """

    part_prompts: Annotated[int, msgspec.Meta(ge=0)] = 0

    def batch(self, progress: Progress) -> int:
        complete, missing = progress.complete, progress.missing
        if complete >= missing:
            return missing
        return complete if self.part_prompts and complete >= self.part_prompts else 0


class Sync(BatchInParts, frozen=True):
    """Rounds: the trainer asks, groups start, and the batch goes when enough of them are whole.

    `over_prompts` starts more groups than a batch takes; groups that are unfinished when the batch
    is full are set back (APRIL, arXiv 2509.18521, with partial rollout; without it, thrown away).
    Groups that have spent a budget of tokens do not count: others start in their place.
    """

    over_prompts: Times = 1.0
    stops_at_delivery = True

    def launch(self, progress: Progress) -> Launch | None:
        if not progress.trainer_waiting:
            return None
        if progress.round is None or progress.spent:
            return _fill(progress, ceil(progress.prompts_per_step * self.over_prompts - 1e-9))
        return _make_up(progress)


class TailBatching(BatchInParts, frozen=True):
    """Short rounds that set the tail back, and long rounds that collect it.

    RollPacker (arXiv 2509.21009, NSDI'26). A short round starts `over_prompts` times the prompts
    and `over_samples` times the samples. A prompt is done with its first samples, the round with
    its first prompts; the rest starts over in a long round. A long round runs, without
    over-sampling, when a whole batch of prompts has been set back. At the end of the data, the
    remaining prompts go into long rounds too, so that none stays behind.

    A long round sets no prompt back, so no prompt is set back twice. `long_round_share` of a batch
    starts a long round (our addition): fresh prompts fill it up, so that its lengths differ less
    from those of other rounds; together with rounds of like lengths fewer tokens are thrown away.

    With `least_gain` (our addition) `over_prompts` is the maximum. Once a cycle of rounds has shown
    how long responses are, the number of prompts is the one that saves the most steps by
    `estimates.RoundCost`; it is just a batch if that saves less than this share of the steps, as
    on a full fleet, or without a tail.
    """

    over_prompts: Times = 1.25
    over_samples: Times = 1.25
    long_round_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    least_gain: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    stops_at_delivery = True

    @property
    def uses_recent(self) -> bool:
        return self.least_gain > 0

    def launch(self, progress: Progress) -> Launch | None:
        size = progress.prompts_per_step
        if not progress.trainer_waiting:
            return None
        if progress.round is not None:
            return _make_up(progress)
        long = progress.deferred >= self.long_round_share * size
        if long or progress.fresh < size:
            return _fill(progress, size)
        wanted = ceil(size * self._over(progress) - 1e-9) - progress.in_progress
        fresh = max(0, min(wanted, progress.fresh))
        return Launch(fresh=fresh, oversample=self.over_samples)

    def _over(self, progress: Progress) -> float:
        over, size, recent = self.over_prompts, progress.prompts_per_step, progress.recent
        if not self.least_gain or over <= 1 or not progress.capacity.instances:
            return over
        if len(recent) < size * (1 + 1 / (over - 1)):
            return over
        return best_over_prompts(RoundCost(recent, size, progress.capacity), over, self.least_gain)


class Pooled(BatchInParts, frozen=True):
    """Prompts of several batches start together; groups are delivered as they become whole.

    SortedRL (arXiv 2603.23414): a round delivers the first batch that is whole, so that short
    responses are trained early and long ones together. Unfinished groups go on, or start over, in
    the next round. No fresh prompt starts before the pool of `batches` batches is used up, so that
    newer prompts starve none.
    """

    batches: Annotated[int, msgspec.Meta(ge=1)] = 4
    stops_at_delivery = True

    def launch(self, progress: Progress) -> Launch | None:
        size = progress.prompts_per_step
        if not progress.trainer_waiting:
            return None
        if progress.round is not None:
            return _make_up(progress)
        pool = progress.in_progress + progress.deferred
        if pool >= size:
            return Launch(deferred=progress.deferred)
        return _fill(progress, size * self.batches)


class OneStepOff(BatchInParts, frozen=True):
    """One batch is generated while the trainer trains on the one before (verl one-step-off)."""

    stops_at_delivery = True
    least_staleness = 1

    def launch(self, progress: Progress) -> Launch | None:
        size = progress.prompts_per_step
        if not progress.fresh + progress.deferred:
            return None
        if progress.round is not None:
            return _make_up(progress)
        return None if progress.update_pending else _fill(progress, size)


class FullyAsync(BatchInParts, frozen=True):
    """Groups start whenever freshness has room; a batch goes when enough of them are whole.

    `max_groups` bounds the groups in flight, 0 for no bound but freshness. `max_ahead` bounds the
    groups in flight plus those that wait for the trainer, in batches; 0 for no bound. Without them,
    freshness allows a burst at the start and a queue of old samples from then on. As many groups as
    keep the fleet busy are as fast and give fresher samples (verl's staleness_threshold and AReaL's
    max_concurrent are bounds of this kind).

    `window_fraction` of the groups that `max_ahead` allows is the window, 0 for none: counted from
    the oldest group that is not whole, only the groups that started within the window may be
    trained (MiniMax Forge's windowed FIFO). Short groups cannot overtake long ones further.
    """

    max_groups: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_ahead: Annotated[float, msgspec.Meta(ge=0, le=MAX_SIZE)] = 0.0
    window_fraction: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    stops_at_delivery = False

    def __post_init__(self) -> None:
        if 0 < self.max_ahead < 1:
            raise ValueError(
                f"max_ahead = {self.max_ahead}: fewer groups than a batch would never fill one; "
                f"expected at least 1.0, or 0 for no bound"
            )
        if self.window_fraction and not self.max_ahead:
            raise ValueError("window_fraction is a share of max_ahead, which is not set")

    def window(self, progress: Progress) -> int:
        return ceil(progress.prompts_per_step * self.max_ahead * self.window_fraction - 1e-9)

    def launch(self, progress: Progress) -> Launch | None:
        room = progress.deferred + progress.fresh
        if self.max_groups:
            room = min(room, self.max_groups - progress.active)
        if self.max_ahead:
            most = ceil(progress.prompts_per_step * self.max_ahead - 1e-9)
            room = min(room, most - progress.in_progress + progress.in_batch)
        if room <= 0:
            return None
        deferred = min(progress.deferred, room)
        return Launch(fresh=min(progress.fresh, room - deferred), deferred=deferred)
