"""Weights: which instances start their update, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from rollout_sched.core.roles import Instance, Progress


class Rolling(msgspec.Struct, frozen=True):
    """So many instances at a time; the others go on with the weights they have.

    The fleet never stands still as a whole, at the price of a longer time with mixed versions, for
    which staleness counts the oldest. The rolling update of service fleets (Kubernetes Deployments,
    maxUnavailable); updating weights behind a router is asked for in sglang issue 4282.
    """

    at_once: Annotated[int, msgspec.Meta(ge=1)] = 1

    def choose(self, outdated: Sequence[Instance], progress: Progress) -> Sequence[Instance]:
        return outdated[: max(0, self.at_once - progress.updating)]


class AllAtOnce(msgspec.Struct, frozen=True):
    """Every instance at the same time.

    `when` = "now" does not wait for anything but what the interruption role asks for;
    "between_batches" waits until no launched group is unfinished. `every`: only when the fleet is
    so many versions behind (verl's trigger_parameter_sync_step).
    """

    when: Literal["now", "between_batches"] = "now"
    every: Annotated[int, msgspec.Meta(ge=1)] = 1

    @property
    def least_staleness(self) -> int:
        """How far the fleet falls behind before it is updated."""
        return self.every - 1

    def choose(self, outdated: Sequence[Instance], progress: Progress) -> Sequence[Instance]:
        if self.every > 1 and progress.version - progress.fleet_version < self.every:
            return ()
        return () if self.when == "between_batches" and progress.active else outdated
