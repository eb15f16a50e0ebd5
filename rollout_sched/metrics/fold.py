"""The common interface of folds: each names the events and actions that it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

#: Called with the time in seconds and an event, or one of the actions that answered it.
Handler = Callable[[float, Any], None]


class Fold(Protocol):
    """A fold over (now, event, actions)."""

    def handlers(self) -> Mapping[type[Any], Handler]:
        """The handlers by type of event and action."""
