"""Weights: which instances start their update, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from rollout_sched.core.model.roles import Instance, Progress, Weights


class Rolling(Weights, msgspec.Struct, frozen=True):
    """`at_once` instances at a time; the others go on with the weights they have.

    The fleet never stops as a whole, but has mixed versions for longer, and staleness counts the
    oldest of them. `order`: as they "joined", or the "emptiest" first, which has the least to
    interrupt. This is the rolling update of service fleets (Kubernetes Deployments,
    maxUnavailable); sglang issue 4282 asks for weight updates behind a router.
    """

    at_once: Annotated[int, msgspec.Meta(ge=1)] = 1
    order: Literal["joined", "emptiest"] = "joined"

    def choose(self, outdated: Sequence[Instance], progress: Progress) -> Sequence[Instance]:
        if self.order == "emptiest":
            outdated = sorted(outdated, key=lambda instance: instance.in_flight)
        return outdated[: max(0, self.at_once - progress.updating)]


class AllAtOnce(Weights, msgspec.Struct, frozen=True):
    """Every instance at the same time.

    `when` = "now" waits only for what the interruption role asks for; "between_batches" waits until
    no launched group is unfinished. `every`: update only when the fleet is that many versions
    behind (verl's trigger_parameter_sync_step). `reopen`: instances serve again when the last of
    those that began together is ready, or each "alone" (AsyncFlow, arXiv 2507.01663).
    """

    when: Literal["now", "between_batches"] = "now"
    every: Annotated[int, msgspec.Meta(ge=1)] = 1
    reopen: Literal["together", "alone"] = "together"

    def choose(self, outdated: Sequence[Instance], progress: Progress) -> Sequence[Instance]:
        if self.every > 1 and progress.version - progress.fleet_version < self.every:
            return ()
        return () if self.when == "between_batches" and progress.active else outdated
