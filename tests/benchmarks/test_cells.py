"""Cells: what is run once is kept, and a draw is another workload of the same kind."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks import cells
from benchmarks.cells import Cell, Lengths, run_all, trace_of
from rollout_sched.simulators.traces import read
from rollout_sched.simulators.traces.model import resampled

SMALL = Lengths(6, 2, 100.0, 0.5, 0.5, 400)
CELL = Cell("dplb", SMALL, "tiny-cpu-2", prompts_per_step=3)


def test_a_run_is_kept_and_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = msgspec.structs.replace(CELL, draw=1)
    first = run_all([CELL, other], tmp_path, jobs=2)
    assert [first[cell].summary.samples_delivered for cell in (CELL, other)] == [12, 12]
    assert first[CELL].summary.total_s != first[other].summary.total_s
    monkeypatch.setattr(Cell, "run", None)
    again = run_all([CELL, other], tmp_path, jobs=1)
    assert again[CELL].summary == first[CELL].summary


def test_a_file_that_changes_is_another_cell(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[routing]\nuse = "round_robin"\n')
    cell = msgspec.structs.replace(CELL, policy=str(file))
    key = cells._key(cell)
    assert key == cells._key(cell) != cells._key(CELL)
    file.write_text('[routing]\nuse = "least_requests"\n')
    assert cells._key(cell) != key


def test_zeroes_are_filled_in_by_the_scenario() -> None:
    assert CELL.world.job.prompts_per_step == 3
    assert CELL.world.job.samples_per_prompt == 0


def test_a_draw_of_a_trace_has_its_prompts_again() -> None:
    assert trace_of("lrm_math_open", 0).groups.keys() == read("lrm_math_open").groups.keys()
    drawn = trace_of("lrm_math_open", 1)
    assert drawn.groups.keys() == resampled(read("lrm_math_open"), 0).groups.keys()


def test_a_draw_of_lengths_is_made_anew() -> None:
    assert trace_of(SMALL, 0).groups != trace_of(SMALL, 1).groups
