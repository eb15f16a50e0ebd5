"""Shares, means and quantiles that are 0 for empty input."""

from __future__ import annotations

from collections.abc import Sequence


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def quantile(ascending: Sequence[float], q: float) -> float:
    """The smallest value that at least a share q of all values does not exceed."""
    if not ascending:
        return 0.0
    return ascending[max(0, -int(-q * len(ascending) // 1) - 1)]
