"""Policy drift: how much of what older weights made the newer ones reject.

A trace tells how long samples were, not what two versions of a policy think of their tokens. So the
test of verified resume (`core.verification`) is a hazard here: each token is rejected with the same
small probability for every version that lies between the weights that made it and those that verify
it. How long a sample is in the end does not depend on it: newer weights are taken to answer at the
recorded length, wherever the old answer was cut.
"""

from __future__ import annotations

import math
import random
from typing import Annotated

import msgspec

from rollout_sched.core.actions import Dispatch


class PolicyDrift(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`rejection_per_token`: of a token, for every version of distance. At 0 everything is kept."""

    rejection_per_token: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0

    def kept(self, dispatch: Dispatch, settled: int, seed: int) -> int:
        """How many leading tokens of a draft pass, by dice for this attempt; 0 if fewer than the
        `settled` ones, which tools have answered."""
        drawn = random.Random(f"{seed}/{dispatch.request}/{dispatch.attempt}").random()
        room = _survives(self.rejection_per_token, drawn)
        passed = 0
        for version, tokens in dispatch.draft:
            distance = max(0, dispatch.salt - version)
            if room < tokens * distance:
                passed += int(room // distance)
                return passed if passed >= settled else 0
            room -= tokens * distance
            passed += tokens
        return passed


def _survives(hazard: float, drawn: float) -> float:
    """Tokens times versions until the first rejection, for a number drawn from [0, 1)."""
    if hazard <= 0:
        return math.inf
    if hazard >= 1:
        return 0.0
    return math.log1p(-drawn) / math.log1p(-hazard)
