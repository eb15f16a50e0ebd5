"""Figures as people read them."""

from __future__ import annotations


def seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.1f} s"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def count(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.2f} M"
    return f"{value / 1e3:.1f} k" if value >= 1e4 else f"{value:,.0f}"
