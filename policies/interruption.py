"""Interruption: what happens to running requests at a weight update and at the end of a round."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from rollout_sched.core.roles import Request


class Never(msgspec.Struct, frozen=True):
    """Nothing is cut: an instance finishes what it has before it gets weights."""

    keeps_partial = False
    keeps_kv = False
    budgeted = False
    at_update: Literal["drain"] = "drain"

    def limit(self, request: Request) -> int | None:
        return None


class Partial(msgspec.Struct, frozen=True):
    """Partial rollout: a request may be cut and goes on from its tokens under newer weights.

    `kv` = "retain" goes on from the KV cache older weights made (PipelineRL, Magistral),
    "recompute" makes it anew (AReaL). `at_update` = "in_place" freezes requests where they are,
    "resubmit" brings them back to be dispatched anew, "drain" lets them finish.
    `segment_tokens` bounds the tokens of one attempt; 0 for no bound. With `segment` = "budget" a
    request that used it up waits for the next round, and other groups start meanwhile (Kimi k1.5's
    output budget per iteration, arXiv 2501.12599 section 2.6.2). With "chunk" it goes back to the
    queue at once and may go on anywhere (Seer's divided rollout, arXiv 2511.14617), which costs a
    prefill wherever its KV is not.
    """

    kv: Literal["retain", "recompute"] = "recompute"
    at_update: Literal["drain", "in_place", "resubmit"] = "in_place"
    segment_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    segment: Literal["budget", "chunk"] = "budget"
    keeps_partial = True

    @property
    def keeps_kv(self) -> bool:
        return self.kv == "retain"

    @property
    def budgeted(self) -> bool:
        return self.segment_tokens > 0 and self.segment == "budget"

    def limit(self, request: Request) -> int | None:
        return self.segment_tokens or None
