"""How long the trainer's samples take: a fold whose memory does not grow with time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_sched.core.actions import Deliver, Discard, Dispatch
from rollout_sched.core.events import GroupSubmitted, RequestFinished, Restored, TrajectoryEnded
from rollout_sched.metrics.fold import Handler
from rollout_sched.metrics.histogram import SECONDS, Histogram


class SampleTimes:
    """Times of groups and their samples.

    wait      seconds from a group's submission to its first dispatch
    duration  seconds from a sample's first dispatch to its end
    """

    __slots__ = ("_started", "_under_way", "_waiting", "duration", "wait")

    def __init__(self) -> None:
        self.wait = Histogram(SECONDS)
        self.duration = Histogram(SECONDS)
        self._waiting: dict[str, float] = {}  # groups, since their submission
        self._under_way: dict[str, float] = {}  # groups, since their first dispatch, oldest first
        self._started: dict[str, float] = {}  # samples, since their first dispatch

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            GroupSubmitted: self._submitted,
            RequestFinished: self._finished,
            TrajectoryEnded: self._finished,
            Restored: self._restored,
            Dispatch: self._dispatched,
            Deliver: self._delivered,
            Discard: self._discarded,
        }

    def oldest_s(self, now: float) -> float:
        """Seconds since the oldest group in progress was first dispatched; 0 without any."""
        return now - next(iter(self._under_way.values()), now)

    def _submitted(self, now: float, event: GroupSubmitted) -> None:
        self._waiting[event.group] = now

    def _dispatched(self, now: float, action: Dispatch) -> None:
        group = action.group
        if not group:
            return
        since = self._waiting.pop(group, None)
        if since is not None:
            self.wait.add(now - since)
            self._under_way[group] = now
        if action.request not in self._started:
            self._started[action.request] = now

    def _finished(self, now: float, event: RequestFinished | TrajectoryEnded) -> None:
        since = self._started.pop(event.request, None)
        if since is not None:
            self.duration.add(now - since)

    def _delivered(self, now: float, action: Deliver) -> None:
        for sample in action.samples:
            self._under_way.pop(sample.group, None)

    def _discarded(self, now: float, action: Discard) -> None:
        if not (action.ends and action.group):
            return
        self._started.pop(action.request, None)
        if action.reason != "surplus":  # for any other reason the group is over
            self._waiting.pop(action.group, None)
            self._under_way.pop(action.group, None)

    def _restored(self, now: float, event: Restored) -> None:
        """Start times do not survive a restart."""
        for times in (self._waiting, self._under_way, self._started):
            times.clear()
