"""Grouped tables."""

from __future__ import annotations

from pathlib import Path

from rollout_sched.simulators.traces import SampleRecord, Turn
from tests.simulators.traces.imported import imported


def test_grouped_csv(tmp_path: Path) -> None:
    trace = imported(
        tmp_path,
        "group_id,sample_idx,prompt_tokens,response_tokens,truncated,arrival_s,model\n"
        "7,1,5,100,1,0.5,m\n7,0,5,60.0,0,0,m\n",
    )
    assert trace.name == "foreign"
    assert trace.about == "grouped CSV"
    assert trace.groups == {
        "7": [
            SampleRecord("7", 0, 5, (Turn(60),), labels={"model": "m"}),
            SampleRecord("7", 1, 5, (Turn(100),), 0.5, "length", labels={"model": "m"}),
        ]
    }


def test_grouped_csv_without_an_end_says_unknown(tmp_path: Path) -> None:
    text = "group_id,sample_idx,prompt_tokens,response_tokens\na,0,5,100\n"
    assert imported(tmp_path, text).groups["a"][0].finish == "unknown"


def test_rows_that_name_only_their_group_are_counted_within_it(tmp_path: Path) -> None:
    text = (
        '{"group":"a","prompt_tokens":5,"response_tokens":7}\n'
        '{"group":"b","prompt_tokens":6,"response_tokens":8,"truncated":true,"task":"maths"}\n'
        '{"group":"a","prompt_tokens":5,"response_tokens":9}\n'
    )
    trace = imported(tmp_path, text)
    assert [sample.response_tokens for sample in trace.groups["a"]] == [7, 9]
    (cut,) = trace.groups["b"]
    assert (cut.finish, dict(cut.labels)) == ("length", {"task": "maths"})


def test_an_index_that_is_given_is_kept(tmp_path: Path) -> None:
    line = '{{"group":"a","sample":{},"prompt_tokens":5,"response_tokens":{}}}\n'
    trace = imported(tmp_path, line.format(1, 10) + line.format(0, 20))
    assert [sample.response_tokens for sample in trace.groups["a"]] == [20, 10]
