"""Helpers that both benchmarks share: medians with their ranges, tables, lists of names."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of some repetitions."""

    median: float
    least: float
    most: float

    def show(self, decimals: int) -> str:
        """`12.3 (11.9-13.0)`, or `12.3` if all are equal."""
        middle, least, most = (
            f"{value:,.{decimals}f}" for value in (self.median, self.least, self.most)
        )
        return middle if least == most else f"{middle} ({least}-{most})"


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose first row is its header, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ruled = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in ruled
    ]


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argument type: some of the known names, separated by commas."""
    known = list(known)

    def convert(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return chosen

    return convert
