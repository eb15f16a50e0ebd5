"""Ordering: which waiting request goes first. Smaller keys go first, ties in order of launch."""

from __future__ import annotations

from typing import Annotated

import msgspec

from rollout_sched.core.model.roles import Ordering, Request


class Fifo(Ordering, msgspec.Struct, frozen=True):
    """In order of launch."""

    def key(self, request: Request) -> int:
        return 0


class LongestFirst(Ordering, msgspec.Struct, frozen=True):
    """The longest expected remainder first, so that the tail starts early (StreamRL).

    Before them go the first `probes` samples of every group: once one of them has finished, the
    group's other samples can be classified as long or short (Seer's probes, arXiv 2511.14617).
    """

    probes: Annotated[int, msgspec.Meta(ge=0)] = 0

    def key(self, request: Request) -> tuple[bool, int]:
        remaining = request.expected_tokens - request.response_tokens
        return request.index >= self.probes, -remaining


class ShortestFirst(Ordering, msgspec.Struct, frozen=True):
    """The shortest expected remainder first, for early updates (SortedRL)."""

    def key(self, request: Request) -> int:
        return request.expected_tokens - request.response_tokens


class ResumedFirst(Ordering, msgspec.Struct, frozen=True):
    """Interrupted requests before new ones (APRIL, slime): they are the oldest."""

    def key(self, request: Request) -> bool:
        return not request.resumed
