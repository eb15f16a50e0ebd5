"""Lending: which instances make way for a trainer on their GPUs before its batch is whole."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollout_sched.core.roles import FleetView, Instance, Progress


class Keep(msgspec.Struct, frozen=True):
    """None: the trainer waits until its batch is whole, and then takes all GPUs."""

    lends = False

    def choose(self, fleet: FleetView, progress: Progress) -> Sequence[Instance]:
        return ()
