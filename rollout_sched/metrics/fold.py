"""The common interface of folds: each names the events and actions that it uses."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from rollout_sched.core.model.actions import Action
from rollout_sched.core.model.events import Event

#: Called with the time in seconds and an event, or one of the actions that answered it.
Handler = Callable[[float, Any], None]


class Fold(Protocol):
    """A fold over (now, event, actions)."""

    def handlers(self) -> Mapping[type[Any], Handler]:
        """The handlers by type of event and action."""


def by_type(*folds: Fold) -> dict[type[Any], tuple[Handler, ...]]:
    """The handlers of all folds, by type of event and action, in the order of the folds."""
    handlers: dict[type[Any], tuple[Handler, ...]] = {}
    for fold in folds:
        for kind, handler in fold.handlers().items():
            handlers[kind] = (*handlers.get(kind, ()), handler)
    return handlers


class Folded:
    """Runs additional folds, which are not part of `Metrics`, together over a journal. Passes each
    event and action to the folds that use it, in order."""

    def __init__(self, *folds: Fold) -> None:
        self._handlers = by_type(*folds)

    def observe(self, now: float, event: Event, actions: Iterable[Action]) -> None:
        """Take the next entry of the journal and the actions of the scheduler."""
        handlers = self._handlers
        for handle in handlers.get(type(event), ()):
            handle(now, event)
        for action in actions:
            for handle in handlers.get(type(action), ()):
                handle(now, action)


# ------------------------------------------------------------------------------------------
# Histograms as shown by a scrape: values counted per bucket, at one list entry per bucket.
#
# The bounds are those of the endpoint picker of Kubernetes' inference gateway
# (gateway-api-inference-extension and llm-d-router, pkg/epp/metrics, 2026-11), so that the same
# query works for both; the bounds in seconds reach an hour, as long responses do.

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


# ------------------------------------------------------------------------------------------
# Shares, means and quantiles that are 0 for empty input.


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def quantile(ascending: Sequence[float], q: float) -> float:
    """The smallest value that at least a share q of all values does not exceed."""
    if not ascending:
        return 0.0
    return ascending[max(0, -int(-q * len(ascending) // 1) - 1)]


#: Student's t, two-sided 95 %, by degrees of freedom from 1; normal beyond.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def t95(values: int) -> float:
    """Standard deviations on each side of the mean of `values` values, at least 2, in which 95 % of
    Student's distribution lie."""
    return _T95[values - 2] if values - 2 < len(_T95) else 1.96
