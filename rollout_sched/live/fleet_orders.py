"""Passes the scheduler's orders for instances to their supervisors, and reports lent instances."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rollout_sched.core.actions import Lend, Pause, Reclaim, Release, Resume, UpdateWeights
from rollout_sched.live.control_orders import ControlOrders
from rollout_sched.live.live_fleet import LiveFleet

log = logging.getLogger(__name__)


class FleetOrders:
    """`orders`: the function that carries out an action, by its type. `on_lent` is called with an
    instance that is paused, so that the trainer may use its GPUs; `on_reclaimed` with one that the
    trainer must give back. `afterwards` calls a function when the current event was handled."""

    def __init__(self, fleet: LiveFleet, afterwards: Callable[..., None]) -> None:
        self.on_lent: Callable[[str], None] | None = None
        self.on_reclaimed: Callable[[str], None] | None = None
        self.orders: dict[type[Any], Callable[[Any], None]] = {
            Pause: self._pause,
            Resume: self._resume,
            UpdateWeights: self._update_weights,
            Lend: self._lend,
            Reclaim: self._reclaim,
            Release: self._release,
        }
        self._fleet = fleet
        self._afterwards = afterwards

    def take_back(self, instance: str) -> None:
        """The trainer no longer uses an instance that was lent to it."""
        self._of(instance).take_back()

    def _pause(self, action: Pause) -> None:
        self._of(action.instance).pause(action.mode, action.clear_cache)

    def _resume(self, action: Resume) -> None:
        self._of(action.instance).resume()

    def _update_weights(self, action: UpdateWeights) -> None:
        self._of(action.instance).update(action.version, self._fleet.loader)

    def _lend(self, action: Lend) -> None:
        self._of(action.instance).lend(self._lent)

    def _lent(self, instance: str) -> None:
        if self.on_lent is None:
            return
        try:
            self.on_lent(instance)
        except Exception:  # the trainer's error: the instance has carried out its order
            log.exception("instance %s was lent to the trainer, whose callback failed", instance)

    def _reclaim(self, action: Reclaim) -> None:
        if self.on_reclaimed is not None:
            self._afterwards(self.on_reclaimed, action.instance)

    def _release(self, action: Release) -> None:
        self._fleet.supervisor(action.instance).membership.drained.set()

    def _of(self, instance: str) -> ControlOrders:
        return self._fleet.supervisor(instance).orders
