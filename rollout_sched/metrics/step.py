"""The figures of one step."""

from __future__ import annotations

import msgspec

from rollout_sched.metrics.averages import share


class Step(msgspec.Struct):
    """One batch: from the delivery before it to its own (seconds, tokens, instance-seconds). Its
    delivery is that of its last part.

    `rollout_s` is how long anything was in flight; `t50_s`, `t90_s` and `t99_s` are from the step's
    first moment in flight until that share of the batch is finished; `span_s` is from the first
    dispatch of any of the batch's groups, which may be in an earlier step, to its delivery.
    `tokens` are to be trained; `masked_tokens` were delivered with them and are not trained.
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
    verified_tokens: int = 0
    masked_tokens: int = 0
    generated_tokens: int = 0
    discarded_tokens: int = 0
    max_staleness: int = 0
    capacity_s: float = 0.0
    idle_s: dict[str, float] = msgspec.field(default_factory=dict)
    vacant_s: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def idle_bubble(self) -> float:
        return share(sum(self.idle_s.values()), self.capacity_s)

    @property
    def occupancy_bubble(self) -> float:
        return share(sum(self.vacant_s.values()), self.capacity_s)
