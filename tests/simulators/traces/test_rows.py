"""Rows of foreign formats: every value is checked where it is read, and named when it is wrong."""

from __future__ import annotations

from itertools import combinations

import pytest

from rollout_sched.simulators.traces.model import TraceError
from rollout_sched.simulators.traces.rows import csv_records, csv_rows, json_rows
from rollout_sched.simulators.traces.store import IMPORTERS, recognised


def csv(*lines: str) -> list:
    numbered = iter([(line, f"{text}\n") for line, text in enumerate(lines, start=2)])
    return list(csv_rows("t.csv", ["tokens", "s", "name"], csv_records("t.csv", numbered)))


def test_a_row_reads_numbers_and_keeps_the_rest_as_labels():
    (row,) = csv("12,0.5,x")
    assert row.tokens("tokens") == 12
    assert row.seconds("s") == 0.5
    assert row.labels("tokens", "s") == {"name": "x"}


@pytest.mark.parametrize("value", ["0", "-3", "1.5", "many", ""])
def test_tokens_are_whole_and_at_least_one(value: str):
    (row,) = csv(f"{value},0,x")
    with pytest.raises(TraceError, match=r"t.csv, line 2, field 'tokens'"):
        row.tokens("tokens")


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "soon"])
def test_seconds_are_finite_and_not_negative(value: str):
    (row,) = csv(f"1,{value},x")
    with pytest.raises(TraceError, match=r"t.csv, line 2, field 's'"):
        row.seconds("s")


def test_a_row_with_too_few_cells_is_named():
    with pytest.raises(TraceError, match="line 2"):
        csv("1,2")


def test_a_quoted_value_may_have_line_breaks_and_quotes():
    rows = csv('1,0,"a', "", '""b"", c"', "2,0,d", "", ",,", "3,0,e")
    assert [row.fields["name"] for row in rows] == ['a\n\n"b", c', "d", "e"]
    assert [row.line for row in rows] == [2, 5, 8]


def test_a_quote_that_does_not_end_is_named_where_its_row_begins():
    with pytest.raises(TraceError, match=r"t.csv, line 3: not CSV \(unexpected end of data\)"):
        csv("1,0,a", '2,0,"b', "3,0,c")


def test_a_value_may_be_as_long_as_a_line():
    (row,) = csv(f"1,0,{'x' * 200_000}")
    assert len(str(row.fields["name"])) == 200_000


@pytest.mark.parametrize("found", ["1732602000", "1732602000000", "1732602000000000"])
def test_a_unix_time_is_in_the_unit_of_its_size(found: str):
    (row,) = csv(f"1,{found},x")
    assert row.time("s") == 1732602000


def test_nan_matters_only_where_it_is_read():
    line = '{"prompt_tokens": NaN, "score": -Infinity, "text": "NaN"}'
    (row,) = json_rows("t.jsonl", iter([(1, line)]))
    assert row.labels() == {"text": "NaN"}
    with pytest.raises(TraceError, match=r"t.jsonl, line 1, field 'prompt_tokens': found None"):
        row.tokens("prompt_tokens")
    with pytest.raises(TraceError, match=r"t.jsonl, line 1: NaN or Infinity"):
        list(json_rows("t.jsonl", iter([(1, '{"a": NaN, "b"')])))


def test_a_json_line_that_is_no_object_is_named():
    with pytest.raises(TraceError, match=r"t.jsonl, line 1"):
        list(json_rows("t.jsonl", iter([(1, "[1]")])))


def test_no_format_hides_another() -> None:
    for earlier, later in combinations(IMPORTERS, 2):
        assert not earlier.columns <= later.columns, (earlier.about, later.about)


def test_each_is_found_by_its_columns_whatever_else_is_there() -> None:
    for importer in IMPORTERS:
        assert recognised("x", 1, [*importer.columns, "more"]) is importer
        assert importer.about
