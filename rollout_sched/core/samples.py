"""What is handed out: segments and samples. Frozen, compared by value, and they survive JSON."""

from __future__ import annotations

import msgspec


class Segment(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Tokens of one request made under one version on one instance.

    `verified`: older versions have made them, and this one has passed them (see `verification`).
    `masked`: they are too old to be trained, and are only what the others follow.
    """

    version: int
    tokens: int
    instance: str
    verified: bool = False
    masked: bool = False


class DeliveredSample(msgspec.Struct, frozen=True, gc=False):
    """A finished request as the trainer receives it.

    `staleness` is the trainer's version at delivery minus the oldest version in `segments` that are
    trained. `masked_tokens` of the response are not.
    `finish` is "stop" or "length". `verified_tokens` of the response were verified, not made, by
    the version that they count as.
    """

    request: str
    group: str
    index: int
    prompt_tokens: int
    response_tokens: int
    segments: tuple[Segment, ...]
    staleness: int
    finish: str
    verified_tokens: int = 0
    masked_tokens: int = 0
