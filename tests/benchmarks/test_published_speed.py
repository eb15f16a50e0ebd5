"""The published figures beside guesses: what the docs show is what the command prints."""

from __future__ import annotations

from pathlib import Path

from benchmarks.published_speed import ROWS, table


def test_the_table_of_the_docs_is_the_one_that_the_command_prints() -> None:
    docs = Path(__file__).parents[2] / "docs" / "prediction.md"
    assert table() in docs.read_text()


def test_it_has_ten_models_and_eight_accelerators() -> None:
    assert len({row.model for row in ROWS}) >= 10
    assert len({row.gpu for row in ROWS}) >= 8
