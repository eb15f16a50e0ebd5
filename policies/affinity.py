"""Affinity: does a request of a session return to its KV, even if others have less load?"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from rollout_sched.core.model.roles import Affinity, Instance, Request

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]

MARGIN: Final = 2
"""requests that home may have more than the other instance without a comparison of costs"""
PREFILL_TOKENS_PER_S: Final = 25_000.0
WAIT_S: Final = 0.05
"""seconds that each request more than on the other instance delays one"""


def worth_staying(
    request: Request,
    kv_instance: Instance,
    elsewhere: Instance,
    *,
    margin: int,
    prefill_tokens_per_s: float,
    wait_s: float,
) -> bool:
    """Whether the wait that leaving saves costs no more than computing the context again.

    A fixed threshold loses 18-20 % to re-prefills (verl PR 6533); a margin of 2 per session won
    (verl PR 7435).
    """
    ahead = kv_instance.in_flight - elsewhere.in_flight
    if ahead <= margin:
        return True
    return ahead * wait_s <= request.context_tokens / prefill_tokens_per_s


class ByCost(Affinity, msgspec.Struct, frozen=True):
    """The request returns home, unless leaving is worth the re-prefill.

    It leaves only if home has more than `margin` requests more than the instance that the routing
    chose *and* the wait saved (`wait_s` seconds per request of that difference) exceeds the time to
    compute the context again at `prefill_tokens_per_s`.
    """

    margin: Count = MARGIN
    prefill_tokens_per_s: Positive = PREFILL_TOKENS_PER_S
    wait_s: Positive = WAIT_S

    def stays(self, request: Request, kv_instance: Instance, elsewhere: Instance) -> bool:
        return worth_staying(
            request,
            kv_instance,
            elsewhere,
            margin=self.margin,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            wait_s=self.wait_s,
        )


class NoAffinity(Affinity, msgspec.Struct, frozen=True):
    """Sessions are ignored: only the routing decides where a request goes."""

    keeps_sessions = False

    def stays(self, request: Request, kv_instance: Instance, elsewhere: Instance) -> bool:
        return False
