"""What can be wrong with a store; a module of its own because no exception is compiled."""

from __future__ import annotations

from pathlib import Path

from rollout_sched.core.errors import CallerError, RolloutError


class StoreError(CallerError):
    """A store cannot be opened; the text names it, what is wrong with it, and the remedy."""


class StoreInUse(StoreError):
    """Another process holds it."""


class StoreOfOtherFormat(StoreError):
    """Another version of the program has written it."""


class StoreDamaged(StoreError):
    """It cannot be read as a whole; what is sound of it can be salvaged."""

    def __init__(self, folder: Path, why: object) -> None:
        super().__init__(
            f"store {folder} is damaged: {why}; `rollout-sched store salvage {folder}` keeps what "
            "is sound and says what is lost, or move the folder away to begin anew"
        )


class PieceDamaged(RolloutError):
    """The tokens at some place are not those that were written there."""


class StoreFull(CallerError):
    """The disk has no room: nothing new is taken until there is."""


class StoreBroken(RolloutError, RuntimeError):
    """The disk has failed: nothing can be promised any more."""
