"""What the folds yield: the figures of one step, and of a run."""

from __future__ import annotations

import msgspec

from rollout_sched.metrics.fold import share
from rollout_sched.metrics.length_bias import LengthBias


class Step(msgspec.Struct):
    """One batch: from the delivery before it to its own (seconds, tokens, instance-seconds). Its
    delivery is that of its last part.

    `rollout_s` is how long anything was in flight; `t50_s`, `t90_s` and `t99_s` are from the step's
    first moment in flight until that share of the batch is finished; `span_s` is from the first
    dispatch of any of the batch's groups, which may be in an earlier step, to its delivery.
    `tokens` are to be trained; `masked_tokens` were delivered with them and are not trained.
    `partial`: some samples ended before the run was observed (it was restored), and count as ended
    with the delivery, so the three times say little.
    """

    version: int
    start_s: float
    end_s: float = 0.0
    rollout_s: float = 0.0
    span_s: float = 0.0
    t50_s: float = 0.0
    t90_s: float = 0.0
    t99_s: float = 0.0
    trainer_wait_s: float = 0.0
    samples: int = 0
    tokens: int = 0
    fresh_tokens: int = 0
    masked_tokens: int = 0
    generated_tokens: int = 0
    discarded_tokens: int = 0
    max_staleness: int = 0
    capacity_s: float = 0.0
    idle_s: dict[str, float] = msgspec.field(default_factory=dict)
    vacant_s: dict[str, float] = msgspec.field(default_factory=dict)
    partial: bool = False

    @property
    def idle_bubble(self) -> float:
        return share(sum(self.idle_s.values()), self.capacity_s)

    @property
    def occupancy_bubble(self) -> float:
        return share(sum(self.vacant_s.values()), self.capacity_s)


class Summary(msgspec.Struct, frozen=True):
    """All steps together. Rates are per second of the whole run.

    A run begins with an empty fleet and ends with a draining one. So its seconds are also split:
    `first_step_s` until the first delivery, `steady_s` until that of the last step that launched a
    group, `drain_s` for the rest; `steady_*` is about the steps between.
    `equal_length_tokens_per_s` are the delivered tokens per second, counted as no more than the
    trainer had asked for: a policy that trains longer samples gains nothing by it, and one that
    trains shorter samples has fewer tokens to count.
    """

    total_s: float
    first_step_s: float
    steady_s: float
    drain_s: float
    rollout_s: float
    t50_s: float
    t90_s: float
    t99_s: float
    tokens_per_s: float
    accepted_tokens_per_s: float
    equal_length_tokens_per_s: float
    fresh_tokens_per_s: float
    steady_accepted_tokens_per_s: float | None
    idle_bubble: float
    idle_bubble_by_cause: dict[str, float]
    occupancy_bubble: float
    occupancy_bubble_by_cause: dict[str, float]
    preemptions: int
    resumed_attempts: int
    reprefilled_tokens: int
    drafted_tokens: int
    draft_acceptance: float
    masked_tokens: int
    discarded_tokens: int
    discarded_tokens_by_cause: dict[str, int]
    filtered_groups: int
    trainer_wait_s: float
    staleness_mean: float
    staleness_max: int
    staleness_histogram: dict[int, int]
    length_bias: LengthBias
    oldest_prompt_age_steps: int
    samples_delivered: int
    steps: int
