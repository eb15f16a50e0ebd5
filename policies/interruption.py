"""Interruption: what happens to running requests at a weight update and at the end of a round."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from rollout_sched.core.model.roles import Interruption, Request


class NoInterruption(Interruption, msgspec.Struct, frozen=True):
    """No request is interrupted: an instance finishes its requests before it gets weights."""

    keeps_partial = False
    keeps_kv = False
    at_update: Literal["drain"] = "drain"

    def limit(self, request: Request) -> int | None:
        return None


class Partial(Interruption, msgspec.Struct, frozen=True):
    """Partial rollout: a request may be interrupted and goes on from its tokens under newer
    weights.

    `kv` = "retain" goes on from the KV cache that older weights made (PipelineRL, Magistral),
    "recompute" computes it again (AReaL). `at_update` = "in_place" freezes requests where they are,
    "resubmit" returns them to be dispatched again, "drain" lets them finish.

    `segment_tokens` bounds the tokens of one attempt; 0 for no bound. With `segment` = "budget" a
    request that used it up waits for the next round, and other groups start meanwhile (Kimi k1.5's
    output budget per iteration, arXiv 2501.12599 section 2.6.2). With "chunk" it returns to the
    queue at once and may go on anywhere (Seer's divided rollout, arXiv 2511.14617), which costs a
    prefill unless it goes on where its KV is.

    A response with a field that an engine applies to it as one piece, a grammar for instance,
    cannot be resumed. It gets no `segment_tokens`. With `unresumable` = "finish" an update by
    "resubmit" waits for it, with "start_over" it does not.
    """

    kv: Literal["retain", "recompute"] = "recompute"
    at_update: Literal["drain", "in_place", "resubmit"] = "in_place"
    segment_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    segment: Literal["budget", "chunk"] = "budget"
    unresumable: Literal["finish", "start_over"] = "finish"
    keeps_partial = True

    @property
    def keeps_kv(self) -> bool:
        return self.kv == "retain"

    @property
    def budgeted(self) -> bool:
        return self.segment_tokens > 0 and self.segment == "budget"

    def limit(self, request: Request) -> int | None:
        return self.segment_tokens or None
