"""The rule that judges predictions, and the table that shows them."""

from __future__ import annotations

import pytest

from benchmarks.prediction_table import Cell, Figures, Pair, errors, repeat_spread, table


def cell(*ratios: float, t90: float = 1.0) -> Cell:
    measured = Figures(2.0, 1.0, 3)
    return Cell(
        "short", "areal", [Pair(measured, Figures(2.0 * ratio, t90, 4)) for ratio in ratios]
    )


def test_the_error_of_a_cell_is_that_of_its_middle_repetition() -> None:
    makespan, t90 = cell(0.5, 1.04, 1.2, t90=0.9).errors
    assert (makespan, t90) == (pytest.approx(0.04), pytest.approx(0.1))


def test_errors_are_over_cells_and_figures() -> None:
    assert errors([cell(1.02, t90=1.04), cell(0.94, t90=1.08)]) == (
        pytest.approx(0.05),
        pytest.approx(0.08),
    )


def test_repetitions_that_differ_are_told_apart() -> None:
    """Of four ratios to their cell's middle one: 0.9, 1.1, and two of t90 that are alike."""
    cells = [cell(0.9, 1.1)]
    assert repeat_spread(cells) == pytest.approx(0.05)
    assert "lies 5.0% from its cell's median" in table(cells, {}).text


@pytest.mark.parametrize(
    ("cells", "kept"),
    [
        ([cell(1.04)], True),
        ([cell(1.04), cell(1.04), cell(1.09)], True),
        ([cell(1.04), cell(1.04), cell(1.11)], False),
        ([cell(1.06, t90=1.06)], False),
        ([cell(0.89, t90=1.0), cell(1.0)], False),
    ],
)
def test_five_per_cent_in_the_median_and_ten_at_the_worst(cells: list[Cell], kept: bool) -> None:
    found = table(cells, {})
    assert found.kept is kept
    assert ("MISSED" in found.text) is not kept


def test_a_row_has_medians_and_what_they_lie_between() -> None:
    text = table([cell(0.9, 1.0, 1.1)], {"without request_s": [cell(0.7)]}).text
    row = "| short, `areal` | 2.00 s (2.00-2.00) | 1.000 (0.900-1.100) |"
    assert row in text
    assert "| 3, 4 |" in text
    assert "| all terms | 0.0% | 0.0% |" in text
    assert "| without request_s | 15.0% | 30.0% |" in text
