"""Lending: which instances make way for a trainer on their GPUs before its batch is whole."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Annotated

import msgspec

from rollout_sched.core.model.model import InstanceStatus
from rollout_sched.core.model.roles import FleetView, Instance, Lending, Progress
from rollout_sched.policies.estimates import WEIGHTS_TOKENS, LoadEstimate, decode_step

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Part = Annotated[float, msgspec.Meta(gt=0, lt=1)]
AtLeastOne = Annotated[float, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class NoLending(Lending, msgspec.Struct, frozen=True):
    """No instance: the trainer waits until its batch is whole, and then takes all GPUs."""

    lends = False

    def choose(self, fleet: FleetView, progress: Progress) -> Sequence[Instance]:
        return ()


class StageFusion(Lending, msgspec.Struct, frozen=True):
    """A share of the instances makes way once most groups of the batch are whole.

    The inter-stage fusion of RLHFuse (arXiv 2409.13221, NSDI'25), which moves the long tail
    together when about a fifth is left, and the stream trainer of RollPacker (arXiv 2509.21009,
    NSDI'26), which uses half of the GPUs to train and accumulate gradients meanwhile; weights
    change at the end, so that all stays on-policy. The instances with the least to move make way:
    `lent` of the instances, once `whole` of the groups are whole.
    Too early, it costs more than it gains. So the remaining requests, at their expected final
    lengths, must fit `fill` of the KV cache of the instances that stay, and their slots; and a
    decode step on those must take at most `slowdown` times as long as on all. A decode step reads
    the weights and all contexts: `weights_tokens` tokens of context take as long as the weights.
    Instances that serve clients stay.
    """

    whole: Share = 0.8
    lent: Part = 0.5
    fill: Share = 0.8
    slowdown: AtLeastOne = 1.2
    weights_tokens: Positive = WEIGHTS_TOKENS

    def choose(self, fleet: FleetView, progress: Progress) -> Sequence[Instance]:
        size = progress.in_batch + progress.missing
        if not progress.missing > progress.complete >= ceil(self.whole * size) - progress.in_batch:
            return ()
        instances = fleet.instances.values()
        if any(instance.status is not InstanceStatus.SERVING for instance in instances):
            return ()  # some have made way for this batch already, or do not serve
        loads = sorted(map(LoadEstimate, instances), key=lambda load: load.tokens)
        some = [load for load in loads if _may_go(load.instance)][: int(self.lent * len(loads))]
        staying = [load for load in loads if load not in some]
        if not some or not self._bear(loads, staying):
            return ()
        return [load.instance for load in some]

    def _bear(self, loads: Sequence[LoadEstimate], staying: Sequence[LoadEstimate]) -> bool:
        """Whether the instances that stay can take on all remaining requests."""
        room = self.fill * sum(load.instance.kv_tokens for load in staying)
        slots = sum(load.instance.slots for load in staying)
        peak = sum(
            load.context(attempt) + load.tokens_left(attempt)
            for load in loads
            for attempt in load.instance.attempts.values()
        )
        if peak > room or sum(load.requests for load in loads) > slots:
            return False
        tokens = sum(load.tokens for load in loads)
        before = decode_step(tokens / len(loads), self.weights_tokens)
        after = decode_step(tokens / len(staying), self.weights_tokens)
        return after <= self.slowdown * before


def _may_go(instance: Instance) -> bool:
    """Whether its requests belong to batches: requests of clients are not interrupted."""
    attempts = instance.attempts.values()
    return not instance.leaving and all(a.request.group is not None for a in attempts)
