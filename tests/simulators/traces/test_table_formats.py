"""Grouped tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_sched.simulators.traces import SampleRecord, TraceError, Turn
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


def test_a_reason_says_how_a_sample_ended(tmp_path: Path) -> None:
    text = "group,prompt_tokens,response_tokens,finish_reason\n"
    text += "".join(f"a,5,9,{one}\n" for one in ("stop", "length", "abort", "tool_calls", ""))
    finishes = [sample.finish for sample in imported(tmp_path, text).groups["a"]]
    assert finishes == ["stop", "length", "cut", "unknown", "unknown"]


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


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_a_table_of_ones_own_by_the_names_of_its_columns(tmp_path: Path, separator: str) -> None:
    rows = [["n_out", "prompt_id", "task"], ["7", "a", "x,y" if separator != "," else "x"]]
    rows += [["9", "a", ""], ["8", "b", ""]]
    text = "\n".join(map(separator.join, rows))
    trace = imported(tmp_path, text, group="prompt_id", response="n_out")
    lengths = {name: [one.response_tokens for one in of] for name, of in trace.groups.items()}
    assert lengths == {"a": [7, 9], "b": [8]}
    assert trace.groups["a"][0].labels.keys() == {"task"}
    assert {one.prompt_tokens for one in trace.samples()} == {1}, "the table does not say"


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"group": "a", "response": "c"}, "no column 'c'; it has a, b"),
        ({"group": "a"}, "name that of response, too"),
        ({"group": "a", "response": "b", "x": "b"}, "name one of group, response, prompt"),
    ],
)
def test_a_column_that_is_not_there(tmp_path: Path, columns: dict[str, str], says: str) -> None:
    with pytest.raises(TraceError, match=says):
        imported(tmp_path, "a,b\n1,2\n", **columns)


def test_answers_with_their_usage_are_grouped_by_equal_prompts(tmp_path: Path) -> None:
    usage = '"usage":{"prompt_tokens":5,"completion_tokens":%d}'
    asked = '"messages":[{"role":"user","content":"%s"}],"choices":[{"finish_reason":"%s"}]'
    lines = [("a", "stop", 7), ("b", "length", 8), ("a", "stop", 9)]
    text = "".join(f"{{{asked % (who, end)},{usage % made}}}\n" for who, end, made in lines)
    trace = imported(tmp_path, text + f"{{{usage % 3}}}\n" + '{"usage":null}\n')
    found = [[one.response_tokens for one in of] for of in trace.groups.values()]
    assert (found, trace.left_out) == ([[7, 9], [8], [3]], 1)
    assert trace.groups["prompt1"][0].finish == "length"
    alone = imported(tmp_path, '{"prompt_tokens":5,"completion_tokens":7,"total_tokens":12}\n')
    assert [one.response_tokens for one in alone.samples()] == [7]


# ------------------------------------------------------------------------------------------
# Serving traces: groups of one.


def test_serving_csv_becomes_groups_of_one(tmp_path: Path) -> None:
    trace = imported(
        tmp_path, "t_s,prompt_tokens,response_tokens,prefix_hit\n0.0,5,6,0\n4.3,7,8,512\n"
    )
    assert list(trace.groups) == ["0", "1"]
    assert trace.groups["1"][0] == SampleRecord(
        "1", 0, 7, (Turn(8),), 4.3, "unknown", labels={"prefix_hit": "512"}
    )


def test_azure_csv(tmp_path: Path) -> None:
    trace = imported(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
    )
    second = trace.groups["1"][0]
    assert second.arrival_s == pytest.approx(4.314579)
    assert (second.prompt_tokens, second.response_tokens) == (396, 109)


def test_vidur_csv(tmp_path: Path) -> None:
    trace = imported(tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n1.5,10,20\n")
    assert trace.groups["0"][0] == SampleRecord("0", 0, 10, (Turn(20),), 0.0, "unknown")


def test_burstgpt_csv(tmp_path: Path) -> None:
    trace = imported(
        tmp_path,
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n"
        "19440110.0,x-1,43,GPT-4,906,446,1352,Conversation log\n"
        "19440161.0,,2,ChatGPT,36,0,36,API log\n",
    )
    labels = {"Model": "GPT-4", "Log Type": "Conversation log"}
    assert trace.groups == {
        "0": [SampleRecord("0", 0, 906, (Turn(446),), 0.0, "unknown", labels=labels)]
    }
    assert trace.left_out == 1


# ------------------------------------------------------------------------------------------
# Tables of quantiles say what they are.


@pytest.mark.parametrize("rows", ["0.5,6\n", "0.5,6\n0.9,7\n"])
def test_there_is_nothing_to_replay(tmp_path: Path, rows: str) -> None:
    with pytest.raises(TraceError, match=r"foreign\.txt, line 1: a table of quantiles"):
        imported(tmp_path, f"q,input_tokens\n{rows}")


def test_one_without_rows_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"foreign\.txt: no samples"):
        imported(tmp_path, "q,input_tokens\n")
