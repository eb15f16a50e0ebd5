"""Weights: which instances start their update, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from rollout_sched.core.roles import Instance, Progress


class AllAtOnce(msgspec.Struct, frozen=True):
    """Every instance at the same time.

    `when` = "now" does not wait for anything but what the interruption role asks for;
    "between_batches" waits until no launched group is unfinished.
    """

    when: Literal["now", "between_batches"] = "now"

    def choose(self, outdated: Sequence[Instance], progress: Progress) -> Sequence[Instance]:
        return () if self.when == "between_batches" and progress.active else outdated
