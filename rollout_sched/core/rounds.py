"""What a round begins with, and what the groups of a batch came to. Frozen, compared by value."""

from __future__ import annotations

import msgspec


class Launch(msgspec.Struct, frozen=True):
    """Start generating: so many deferred groups, then so many fresh ones.

    `oversample` multiplies the samples asked of a group; the first to finish are kept.
    """

    fresh: int = 0
    deferred: int = 0
    oversample: float = 1.0


class DeliveredGroup(msgspec.Struct, frozen=True):
    """What a group came to: the response tokens of its samples, in any order."""

    prompt_tokens: int
    lengths: tuple[int, ...]
