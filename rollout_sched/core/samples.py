"""What is handed out: segments and samples. Frozen, compared by value, and they survive JSON."""

from __future__ import annotations

import msgspec


class Segment(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one request made under one version on one instance."""

    version: int
    tokens: int
    instance: str


class Sample(msgspec.Struct, frozen=True, gc=False):
    """A finished request as the trainer receives it.

    `staleness` is the trainer's version at delivery minus the oldest version in `segments`.
    `finish` is "stop" or "length".
    """

    request: str
    group: str
    index: int
    prompt_tokens: int
    response_tokens: int
    segments: tuple[Segment, ...]
    staleness: int
    finish: str
