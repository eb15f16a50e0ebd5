"""Admission: how much the scheduler lets pile up on one instance."""

from __future__ import annotations

from typing import Annotated

import msgspec

from rollout_sched.core.roles import Instance

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Unbounded(msgspec.Struct, frozen=True):
    """Everything at once; the queue is inside the instances, where nobody can rebalance it."""

    weighs_tokens = False

    def admits(self, instance: Instance) -> bool:
        return True


class Slots(msgspec.Struct, frozen=True):
    """At most `factor` times the sequences the instance runs at once."""

    factor: Positive = 1.0
    weighs_tokens = False

    def admits(self, instance: Instance) -> bool:
        return len(instance.attempts) < instance.slots * self.factor


class KvTokens(msgspec.Struct, frozen=True):
    """As many as there are slots, while resident and expected tokens fit `fill` of the KV cache.

    Engines admit until they thrash; keeping the sum of expected contexts under the capacity
    avoids preemptions (ThunderAgent, vllm-router's program scheduling). An idle instance always
    takes one.
    """

    fill: Positive = 1.0

    def admits(self, instance: Instance) -> bool:
        return not instance.attempts or (
            instance.in_flight < instance.slots and instance.tokens < instance.kv_tokens * self.fill
        )
