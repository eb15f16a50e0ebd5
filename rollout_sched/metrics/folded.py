"""Runs additional folds, which are not part of `Metrics`, together over a journal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout_sched.core.actions import Action
from rollout_sched.core.events import Event
from rollout_sched.metrics.fold import Fold, Handler


class Folded:
    """Passes each event and action to the folds that use it, in order."""

    def __init__(self, *folds: Fold) -> None:
        self._handlers: dict[type[Any], tuple[Handler, ...]] = {}
        for fold in folds:
            for kind, handler in fold.handlers().items():
                self._handlers[kind] = (*self._handlers.get(kind, ()), handler)

    def observe(self, now: float, event: Event, actions: Iterable[Action]) -> None:
        """Take the next entry of the journal and the actions of the scheduler."""
        handlers = self._handlers
        for handle in handlers.get(type(event), ()):
            handle(now, event)
        for action in actions:
            for handle in handlers.get(type(action), ()):
                handle(now, action)
