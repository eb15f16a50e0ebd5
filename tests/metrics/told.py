"""Folds that are shown a made-up journal."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_sched.core.model.actions import Action
from rollout_sched.core.model.events import Event
from rollout_sched.core.model.model import DeliveredSample, Segment
from rollout_sched.metrics.fold import Fold, Folded

Entry = tuple[float, Event, list[Action]]


def tell(fold: Fold, entries: Iterable[Entry]) -> None:
    folded = Folded(fold)
    for now, event, actions in entries:
        folded.observe(now, event, actions)


def sample(
    request: str, tokens: int = 1, *, group: str = "", staleness: int = 0
) -> DeliveredSample:
    return DeliveredSample(
        request, group, 0, 3, tokens, (Segment(0, tokens, "a"),), staleness, "stop"
    )
