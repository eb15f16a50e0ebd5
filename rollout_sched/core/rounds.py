"""What a round starts with, and the lengths in a delivered group. Frozen, compared by value."""

from __future__ import annotations

import msgspec


class Launch(msgspec.Struct, frozen=True):
    """Start generating: `deferred` deferred groups, then `fresh` fresh ones.

    `oversample` multiplies the samples of a group; the first to finish are kept.
    """

    fresh: int = 0
    deferred: int = 0
    oversample: float = 1.0


class DeliveredGroup(msgspec.Struct, frozen=True):
    """A delivered group: the response tokens of its samples, in any order."""

    prompt_tokens: int
    lengths: tuple[int, ...]
