"""Delivered samples: their staleness, their length, and whether long ones were left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_sched.core.actions import Deliver, Discard
from rollout_sched.metrics.averages import share
from rollout_sched.metrics.fold import Handler
from rollout_sched.metrics.histogram import TOKENS, Histogram

#: Upper bounds of staleness, in versions.
STALENESS = (0, 1, 2, 3, 4, 6, 8, 12, 16)


class Trained:
    """Figures of delivered samples.

    staleness  in versions
    tokens     of the responses
    """

    __slots__ = ("_thrown_samples", "_thrown_tokens", "staleness", "tokens")

    def __init__(self) -> None:
        self.staleness = Histogram(STALENESS)
        self.tokens = Histogram(TOKENS)
        self._thrown_samples = 0
        self._thrown_tokens = 0

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {Deliver: self._delivered, Discard: self._discarded}

    @property
    def length_ratio(self) -> float:
        """Mean length of delivered samples over that of all samples that are over; 1 before any.
        A discarded sample counts with its length so far, so a policy that breaks off long samples
        is in truth further below 1 than this value."""
        delivered = sum(self.tokens.counts)
        if not delivered:
            return 1.0
        every = self.tokens.sum + self._thrown_tokens
        samples = delivered + self._thrown_samples
        return share(self.tokens.sum / delivered, every / samples)

    def _delivered(self, now: float, action: Deliver) -> None:
        for sample in action.samples:
            self.staleness.add(sample.staleness)
            self.tokens.add(sample.response_tokens)

    def _discarded(self, now: float, action: Discard) -> None:
        if action.ends and action.group:
            self._thrown_samples += 1
            self._thrown_tokens += action.tokens
