"""Parquet: the same rows as in lines, and damage that is named."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from rollout_sched.simulators.traces import SampleRecord, TraceError, Turn, read

GROUPED = {
    "group_id": [1, 1, 2],
    "sample_idx": [0, 1, 0],
    "prompt_tokens": [5, 5, 6],
    "response_tokens": [10, 20, 30],
    "task": ["x", None, "y"],
}


def written(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def test_columns_tell_the_format(tmp_path: Path) -> None:
    trace = read(written(tmp_path / "mine.parquet", GROUPED))
    assert trace.name == "mine"
    assert trace.about == "grouped CSV"
    assert trace.groups["1"] == [
        SampleRecord("1", 0, 5, (Turn(10),), 0.0, "unknown", labels={"task": "x"}),
        SampleRecord("1", 1, 5, (Turn(20),), 0.0, "unknown"),
    ]


def test_lists_and_times(tmp_path: Path) -> None:
    turns = {"g": ["a"], "s": [0], "p": [9], "t": [[[5.0, 2.0, 0.5], [6.0, 0.0, None]]]}
    (sample,) = read(written(tmp_path / "t.parquet", turns)).samples()
    assert sample.turns == (Turn(5, 2, 0.5), Turn(6))
    azure = {
        "TIMESTAMP": [datetime(2023, 1, 1), datetime(2023, 1, 1, 0, 1)],
        "ContextTokens": [1, 2],
        "GeneratedTokens": [3, 4],
    }
    assert read(written(tmp_path / "a.parquet", azure)).groups["1"][0].arrival_s == 60.0


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "x", {**GROUPED, "response_tokens": [10, -1, 30]})
    with pytest.raises(TraceError, match=r"x, line 2, field 'response_tokens': found -1"):
        read(path)


def test_failed_requests_and_missing_numbers_are_nulls(tmp_path: Path) -> None:
    columns = {
        **GROUPED,
        "response_tokens": [10.0, float("nan"), 30.0],
        "score": [float("nan")] * 3,
    }
    trace = read(written(tmp_path / "x", columns))
    assert (trace.sample_count, trace.left_out) == (2, 1)
    assert trace.groups["1"][0].labels == {"task": "x"}


def test_shards_are_one_trace(tmp_path: Path) -> None:
    for number in (0, 1, 10, 9):
        columns = {key: values[:1] for key, values in GROUPED.items()}
        written(tmp_path / f"train-{number}.parquet", {**columns, "group_id": [number]})
    (tmp_path / "README.md").write_text("about")
    assert list(read(tmp_path).groups) == ["0", "1", "9", "10"]


@pytest.mark.parametrize("cut", [5, 200])
def test_a_damaged_file(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "x.parquet", GROUPED)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(TraceError, match=r"x\.parquet: damaged Parquet"):
        read(path)


def test_a_damaged_page(tmp_path: Path) -> None:
    path = written(tmp_path / "x.parquet", GROUPED, compression="gzip")
    data = bytearray(path.read_bytes())
    data[20:60] = bytes(40)
    path.write_bytes(data)
    with pytest.raises(TraceError, match="damaged Parquet"):
        read(path)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "x.parquet", GROUPED)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TraceError, match=r"pip install .*\[parquet\]"):
        read(path)
