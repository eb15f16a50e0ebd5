"""Journals short enough to work out every figure by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.model import DeliveredSample, Segment
from rollout_sched.metrics import CAUSES, Metrics


class Tape:
    """A journal in the making: what happened when, and what was answered."""

    def __init__(self, *instances: str, places: float = 4, **options: Any) -> None:
        self.metrics = Metrics(places, **options)
        self.attempts = 0
        self.join(*instances)

    def at(self, now: float, event: ev.Event, *actions: act.Action) -> None:
        self.metrics.observe(now, event, actions)

    def join(self, *names: str, now: float = 0.0) -> None:
        for name in names:
            self.at(now, ev.InstanceJoined(name, 8, 1000))

    def dispatch(self, request: str, instance: str, *, computed: int = 0) -> act.Dispatch:
        self.attempts += 1
        group, _, index = request.partition("/")
        return act.Dispatch(
            request,
            self.attempts,
            instance,
            10,
            100,
            0,
            computed_tokens=computed,
            group=group,
            index=int(index or 0),
        )

    def start(self, now: float, *where: tuple[str, str]) -> None:
        """Dispatch (request, instance) pairs because of something that does not matter."""
        self.at(now, ev.Woke(), *(self.dispatch(*pair) for pair in where))

    def finish(self, now: float, request: str, attempt: int, tokens: int, *then: Any) -> None:
        self.at(now, ev.RequestFinished(request, attempt, tokens), *then)

    def idle(self, total_s: float) -> dict[str, Any]:
        return shares(self.metrics.summary(total_s).idle_bubble_by_cause)

    def vacant(self, total_s: float) -> dict[str, Any]:
        return shares(self.metrics.summary(total_s).occupancy_bubble_by_cause)


def shares(by_cause: dict[str, float]) -> dict[str, Any]:
    assert list(by_cause) == list(CAUSES)
    return {cause: pytest.approx(share) for cause, share in by_cause.items() if share}


def sample(
    request: str, tokens: int = 10, versions: Sequence[int] = (0,), staleness: int = 0
) -> DeliveredSample:
    group, _, index = request.rpartition("/")
    segments = tuple(Segment(v, tokens // len(versions), "i") for v in versions)
    return DeliveredSample(request, group, int(index), 10, tokens, segments, staleness, "stop")


def deliver(
    *samples: DeliveredSample, version: int = 0, part: int = 0, last: bool = True
) -> act.Deliver:
    return act.Deliver(version, version, samples, part, last)
