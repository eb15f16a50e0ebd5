"""Errors of a store."""

from __future__ import annotations

from pathlib import Path

from rollout_sched.core.errors import CallerError, RolloutError


class StoreError(CallerError):
    """A store cannot be opened; the text names the store, the problem and the remedy."""


class StoreInUse(StoreError):
    """Another process uses the store."""


class StoreOfOtherFormat(StoreError):
    """Another version of the program wrote the store."""


class StoreDamaged(StoreError):
    """The database cannot be read as a whole."""

    def __init__(self, folder: Path, why: object) -> None:
        super().__init__(
            f"store {folder} is damaged: {why}; put a copy of the folder in its place, or move "
            "it away to start with a new store"
        )


class StoreBehind(StoreError):
    """Transactions are missing that somebody was promised, or is taken to know of."""

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(
            f"store {folder} {why}; put a right copy of the folder in its place, or give up what "
            f"is missing by `rollout-sched salvage {folder}`, and then start again"
        )


class PieceDamaged(RolloutError):
    """The tokens at some place are not those that were written there."""


class StoreFull(CallerError):
    """The disk is full: no new work is accepted until there is room."""


class StoreBroken(RolloutError, RuntimeError):
    """The disk has failed: nothing more can be made durable."""
