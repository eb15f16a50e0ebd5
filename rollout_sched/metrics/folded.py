"""Folds that are no part of `Metrics`, for who asks for them: shown a journal together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout_sched.core.actions import Action
from rollout_sched.core.events import Event
from rollout_sched.metrics.fold import Fold, Handler


class Folded:
    """Shows each fold what it looks at, in their order."""

    def __init__(self, *folds: Fold) -> None:
        self._handlers: dict[type[Any], tuple[Handler, ...]] = {}
        for fold in folds:
            for kind, handler in fold.handlers().items():
                self._handlers[kind] = (*self._handlers.get(kind, ()), handler)

    def observe(self, now: float, event: Event, actions: Iterable[Action]) -> None:
        """Take the next entry of the journal and what the scheduler answered."""
        handlers = self._handlers
        for handle in handlers.get(type(event), ()):
            handle(now, event)
        for action in actions:
            for handle in handlers.get(type(action), ()):
                handle(now, action)
