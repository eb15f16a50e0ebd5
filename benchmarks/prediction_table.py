"""Compare predictions with measurements: errors by cell, and the rule that judges them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

#: Limits of errors over all cells and figures, fixed before the measurements.
MEDIAN_LIMIT = 0.05
WORST_LIMIT = 0.10


class Figures(NamedTuple):
    """Seconds from the first dispatch to the last delivery; seconds of a step until 90 % of its
    samples were there; and the number of preemptions."""

    makespan_s: float
    t90_s: float
    preemptions: int


class Pair(NamedTuple):
    """Measured and predicted figures of one run."""

    measured: Figures
    predicted: Figures


class Cell(NamedTuple):
    """A workload under a policy, in all repetitions."""

    workload: str
    policy: str
    pairs: list[Pair]

    def ratios(self, figure: Callable[[Figures], float]) -> list[float]:
        return [figure(pair.predicted) / figure(pair.measured) for pair in self.pairs]

    @property
    def errors(self) -> tuple[float, float]:
        """The errors of makespan and t90."""
        makespan, t90 = (abs(median(self.ratios(figure)) - 1) for figure in JUDGED)
        return makespan, t90


#: The figures that the rule judges.
JUDGED: tuple[Callable[[Figures], float], ...] = (
    lambda figures: figures.makespan_s,
    lambda figures: figures.t90_s,
)


class Table(NamedTuple):
    """Markdown, and whether the rule was kept."""

    text: str
    kept: bool


def table(cells: Sequence[Cell], variants: Mapping[str, Sequence[Cell]]) -> Table:
    """`variants`: the same cells predicted by other fits, which are not judged."""
    middle, worst = errors(cells)
    kept = middle <= MEDIAN_LIMIT and worst <= WORST_LIMIT
    lines = [
        "| workload, policy | makespan measured | predicted / measured | t90 measured "
        "| predicted / measured | preemptions measured, predicted |",
        "|---|---|---|---|---|---|",
        *map(_row, cells),
        "",
        f"Error in the median {middle:.1%} (at most {MEDIAN_LIMIT:.0%}), at the worst {worst:.1%} "
        f"(at most {WORST_LIMIT:.0%}): {'kept' if kept else 'MISSED'}.",
        f"Variation of the machine: a repetition lies {repeat_spread(cells):.1%} from its "
        "cell's median, in the median.",
        "",
        "| fit | error in the median | at the worst |",
        "|---|---|---|",
        *_variants({"all terms": cells, **variants}),
    ]
    return Table("\n".join(lines), kept)


def errors(cells: Sequence[Cell]) -> tuple[float, float]:
    """The median and the worst error, over cells and figures."""
    each = [error for cell in cells for error in cell.errors]
    return median(each), max(each)


def repeat_spread(cells: Sequence[Cell]) -> float:
    """The distance of a repetition of a cell from the median one, which no model can predict."""
    return median(
        abs(ratio / median(ratios) - 1)
        for cell in cells
        for ratios in map(cell.ratios, JUDGED)
        for ratio in ratios
    )


def _row(cell: Cell) -> str:
    measured = [pair.measured for pair in cell.pairs]
    makespan, t90 = JUDGED
    preempted = median(figures.preemptions for figures in measured)
    expected = median(pair.predicted.preemptions for pair in cell.pairs)
    return (
        f"| {cell.workload}, `{cell.policy}` | {_seconds([m.makespan_s for m in measured])} "
        f"| {_ratio(cell.ratios(makespan))} | {_seconds([m.t90_s for m in measured])} "
        f"| {_ratio(cell.ratios(t90))} | {preempted:g}, {expected:g} |"
    )


def _variants(fits: Mapping[str, Sequence[Cell]]) -> Iterator[str]:
    for name, cells in fits.items():
        middle, worst = errors(cells)
        yield f"| {name} | {middle:.1%} | {worst:.1%} |"


def _seconds(values: Sequence[float]) -> str:
    return f"{median(values):.2f} s ({min(values):.2f}-{max(values):.2f})"


def _ratio(values: Sequence[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f}-{max(values):.3f})"
