"""Histograms as shown by a scrape: values counted per bucket, at one list entry per bucket.

The bounds are those of the endpoint picker of Kubernetes' inference gateway
(gateway-api-inference-extension and llm-d-router, pkg/epp/metrics, 2026-11), so that the same query
works for both; the bounds in seconds reach an hour, as long responses do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

#: Bounds for durations, in seconds.
SECONDS = (
    *(0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0),
    *(10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0),
    *(1200.0, 1800.0, 2700.0, 3600.0),
)

#: Bounds for tokens.
TOKENS = (1, *(2**power for power in range(3, 21)))


class Histogram:
    """`counts` per bucket, the last above all inclusive `bounds`; `sum` is the sum of values."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, how many values were at most that); infinity comes last."""
        return list(zip([*self.bounds, math.inf], accumulate(self.counts), strict=True))
