"""Affinity: does a request of a session go back to where its KV is, whoever has less to do?"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from rollout_sched.core.roles import Instance, Request

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]

MARGIN: Final = 2
"""requests that home may have more than another without question"""
PREFILL_TOKENS_PER_S: Final = 25_000.0
WAIT_S: Final = 0.05
"""that each request more than elsewhere delays one"""


def worth_staying(
    request: Request,
    home: Instance,
    elsewhere: Instance,
    *,
    margin: int,
    prefill_tokens_per_s: float,
    wait_s: float,
) -> bool:
    """Whether the wait that leaving saves is no more than what computing the context again costs.

    A blind threshold loses 18-20 % to re-prefills (verl PR 6533); a margin of 2 per session won
    (verl PR 7435).
    """
    ahead = home.in_flight - elsewhere.in_flight
    if ahead <= margin:
        return True
    return ahead * wait_s <= request.context_tokens / prefill_tokens_per_s


class ByCost(msgspec.Struct, frozen=True):
    """It goes back, unless leaving is worth the re-prefill.

    Only if home has more than `margin` requests more than the instance that the routing would
    choose *and* the wait saved, `wait_s` seconds per request of that difference, exceeds what
    computing the context again costs at `prefill_tokens_per_s`, does it go there.
    """

    margin: Count = MARGIN
    prefill_tokens_per_s: Positive = PREFILL_TOKENS_PER_S
    wait_s: Positive = WAIT_S
    keeps_sessions = True

    def stays(self, request: Request, home: Instance, elsewhere: Instance) -> bool:
        return worth_staying(
            request,
            home,
            elsewhere,
            margin=self.margin,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            wait_s=self.wait_s,
        )


class Ignored(msgspec.Struct, frozen=True):
    """Sessions mean nothing: the routing alone says where a request goes."""

    keeps_sessions = False

    def stays(self, request: Request, home: Instance, elsewhere: Instance) -> bool:
        return False
