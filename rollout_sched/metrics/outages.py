"""Outages: instances that were lost or left, attempts that failed, and the consequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollout_sched.core.actions import Discard
from rollout_sched.core.events import InstanceJoined, InstanceLost, RequestFailed, Restored
from rollout_sched.metrics.fold import Handler


class OutageFigures(msgspec.Struct, frozen=True):
    """Outages of a whole run.

    instances_lost      number of losses of an instance that was not asked to leave
    instances_left      number of times that an instance left on request
    instances_returned  number of times that an instance came back
    away_s              instance-seconds between going and coming back, or the end
    failed_attempts     attempts without an answer, except those on an instance that was lost
    failed_prompts      groups that could never be whole
    scheduler_restarts  number of times that the scheduler died and another one continued
    """

    instances_lost: int
    instances_left: int
    instances_returned: int
    away_s: float
    failed_attempts: int
    failed_prompts: int
    scheduler_restarts: int = 0


class OutageFold:
    """Folds arrivals and losses of instances, and failures."""

    def __init__(self) -> None:
        self._lost = self._left = self._returned = self._failed_attempts = 0
        self._away_s = 0.0
        self._here: set[str] = set()
        self._gone_at: dict[str, float] = {}
        self._failed_prompts: set[str] = set()
        self._restarts = 0

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            InstanceJoined: self._joined,
            InstanceLost: self._gone,
            RequestFailed: self._failed,
            Discard: self._discarded,
            Restored: self._restored,
        }

    def figures(self, total_s: float) -> OutageFigures:
        """The figures of a run that took `total_s` seconds."""
        return OutageFigures(
            instances_lost=self._lost,
            instances_left=self._left,
            instances_returned=self._returned,
            away_s=self._away_s + sum(total_s - at for at in self._gone_at.values()),
            failed_attempts=self._failed_attempts,
            failed_prompts=len(self._failed_prompts),
            scheduler_restarts=self._restarts,
        )

    def _joined(self, now: float, event: InstanceJoined) -> None:
        if event.instance in self._here:  # it restarted before the loss was noticed
            self._gone(now, InstanceLost(event.instance))
        self._here.add(event.instance)
        gone_at = self._gone_at.pop(event.instance, None)
        if gone_at is not None:
            self._returned += 1
            self._away_s += now - gone_at

    def _gone(self, now: float, event: InstanceLost) -> None:
        name = event.instance
        if name not in self._here:
            return
        self._here.remove(name)
        self._gone_at[name] = now
        if event.asked:
            self._left += 1
        else:
            self._lost += 1

    def _failed(self, now: float, event: RequestFailed) -> None:
        self._failed_attempts += 1

    def _discarded(self, now: float, action: Discard) -> None:
        if action.ends and action.reason == "failed" and action.group:
            self._failed_prompts.add(action.group)

    def _restored(self, now: float, event: Restored) -> None:
        """The instances join again, but were not away."""
        self._restarts += 1
        self._here.clear()
