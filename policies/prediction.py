"""Prediction: how many response tokens a request will have in the end."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Annotated, Literal

import msgspec

from rollout_sched.core.model.roles import Prediction, Request, Siblings


class NoPrediction(Prediction, msgspec.Struct, frozen=True):
    """No prediction: only tokens that exist already count."""

    def estimate(self, siblings: Siblings) -> None:
        return None

    def expect(self, request: Request) -> int:
        return request.known_tokens


class Oracle(Prediction, msgspec.Struct, frozen=True):
    """The true length. Only a replay knows it: it is a reference, not a policy for real runs."""

    lengths: Callable[[str, int], int]

    def estimate(self, siblings: Siblings) -> None:
        return None

    def expect(self, request: Request) -> int:
        return self.lengths(request.siblings.id, request.index)


class GroupHistory(Prediction, msgspec.Struct, frozen=True):
    """A quantile of the lengths of finished siblings; the limit until one has finished (Seer).

    In public traces the other samples of a group predict a response within a factor of 1.2-1.3,
    while a global prior is off by 2-3.4. But a response that runs up to the limit is unexpected
    within its group, hence a high quantile. "quantile": of the finished siblings. "censored":
    Kaplan-Meier, in which running siblings count as longer than what they have made so far.
    """

    quantile: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    method: Literal["quantile", "censored"] = "quantile"

    def estimate(self, siblings: Siblings) -> int | None:
        lengths = siblings.lengths
        if not lengths:
            return None
        if self.method == "censored":
            return self._censored(siblings)
        return lengths[ceil(self.quantile * len(lengths) - 1e-9) - 1]

    def expect(self, request: Request) -> int:
        siblings = request.siblings
        length = siblings.max_tokens if siblings.estimate is None else siblings.estimate
        return max(length, request.known_tokens)

    def _censored(self, siblings: Siblings) -> int:
        running = sorted(r.known_tokens for r in siblings.requests if not r.finish)
        at_risk = len(siblings.lengths) + len(running)
        surviving, gone = 1.0, 0
        for length in siblings.lengths:
            while gone < len(running) and running[gone] < length:
                gone += 1
                at_risk -= 1
            surviving *= 1 - 1 / at_risk
            at_risk -= 1
            if 1 - surviving >= self.quantile - 1e-12:
                return length
        return siblings.max_tokens


class PromptHistory(Prediction, msgspec.Struct, frozen=True):
    """A quantile of the lengths of finished siblings, or else of the prompt's earlier responses.

    Without either it is the length the trainer expects, or else the limit (RhymeRL, arXiv
    2508.18588: a prompt's lengths change little from one epoch to the next).
    """

    quantile: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9

    uses_history = True

    def estimate(self, siblings: Siblings) -> int | None:
        lengths = siblings.lengths
        return lengths[ceil(self.quantile * len(lengths) - 1e-9) - 1] if lengths else None

    def expect(self, request: Request) -> int:
        siblings = request.siblings
        length = siblings.estimate
        if length is None:
            length = length_before(siblings, self.quantile)
        return max(length, request.known_tokens)


def length_before(siblings: Siblings, quantile: float) -> int:
    """The expected length of a response before any sibling has finished: a quantile of the prompt's
    earlier lengths, else what the trainer expects, else the limit."""
    history = siblings.history
    known = None if history is None else history.quantile(quantile)
    if known is None:
        known = siblings.expected_tokens or siblings.max_tokens
    return min(known, siblings.max_tokens)
