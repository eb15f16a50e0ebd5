"""Segments and samples, as handed out. Frozen, compared by value, and they survive JSON."""

from __future__ import annotations

import msgspec


class Segment(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Tokens of one request made under one version on one instance.

    `verified`: older versions made the tokens, and this one has accepted them (see `verification`).
    `masked`: the tokens are too old to be trained, and serve only as context for the others.
    """

    version: int
    tokens: int
    instance: str
    verified: bool = False
    masked: bool = False


class DeliveredSample(msgspec.Struct, frozen=True, gc=False):
    """A finished request as the trainer receives it.

    `staleness` is the trainer's version at delivery minus the oldest version in the `segments` that
    are trained. `masked_tokens` of the response are not trained. `finish` is "stop" or "length".
    `verified_tokens` of the response were not made but verified by the version that they count as.
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
