"""Policy drift: how many of the tokens of older weights the newer weights reject.

A trace has the lengths of samples, not the probabilities that two versions of a policy give to
their tokens. So the test of verified resume (`core.verification`) is a hazard here: each token is
rejected with the same small probability for every version between the weights that generated it and
those that verify it. The final length of a sample does not depend on this: newer weights are
assumed to answer at the recorded length, wherever the old answer was cut.
"""

from __future__ import annotations

import math
import random
from typing import Annotated

import msgspec

from rollout_sched.core.actions import Dispatch


class PolicyDrift(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`rejection_per_token`: per token and version of distance. 0 keeps everything."""

    rejection_per_token: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0

    def kept(self, dispatch: Dispatch, settled: int, seed: int) -> int:
        """How many leading tokens of a draft pass, drawn at random for this attempt; 0 if fewer
        than the `settled` ones, which tools have answered."""
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
    """Tokens times versions until the first rejection, from a number drawn from [0, 1)."""
    if hazard <= 0:
        return math.inf
    if hazard >= 1:
        return 0.0
    return math.log1p(-drawn) / math.log1p(-hazard)
