"""Importers: every foreign format becomes samples, or says why it cannot."""

from pathlib import Path

import pytest

from rollout_sched.simulators.traces import (
    Counting,
    Sample,
    Trace,
    TraceError,
    Turn,
    read,
)


def imported(folder: Path, text: str, counting: Counting | None = None) -> Trace:
    path = folder / "foreign.txt"
    path.write_text(text)
    return read(path, counting)


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
            Sample("7", 0, 5, (Turn(60),), labels={"model": "m"}),
            Sample("7", 1, 5, (Turn(100),), 0.5, "length", labels={"model": "m"}),
        ]
    }


def test_grouped_csv_without_an_end_says_unknown(tmp_path: Path) -> None:
    text = "group_id,sample_idx,prompt_tokens,response_tokens\na,0,5,100\n"
    assert imported(tmp_path, text).groups["a"][0].finish == "unknown"


def test_serving_csv_becomes_groups_of_one(tmp_path: Path) -> None:
    trace = imported(
        tmp_path, "t_s,prompt_tokens,response_tokens,prefix_hit\n0.0,5,6,0\n4.3,7,8,512\n"
    )
    assert list(trace.groups) == ["0", "1"]
    assert trace.groups["1"][0] == Sample(
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
    assert trace.groups["0"][0] == Sample("0", 0, 10, (Turn(20),), 1.5, "unknown")


def test_mooncake_jsonl(tmp_path: Path) -> None:
    trace = imported(
        tmp_path, '{"timestamp":3000,"input_length":10,"output_length":20,"hash_ids":[1,2]}\n'
    )
    assert trace.groups["0"][0] == Sample("0", 0, 10, (Turn(20),), 3.0, "unknown")


def test_short_key_turns(tmp_path: Path) -> None:
    trace = imported(tmp_path, '{"g":3,"s":0,"p":9,"t":[[5,2,null],[6,1,0.5],[7,4,9.0]]}\n')
    assert trace.groups["3"][0] == Sample("3", 0, 9, (Turn(5, 2), Turn(6, 1, 0.5), Turn(7)))


@pytest.mark.parametrize("after", ["[2],[0.5]", "[2,8],[0.5,9]"])
def test_replay_records(tmp_path: Path, after: str) -> None:
    observed, waited = after.split("],[")
    trace = imported(
        tmp_path,
        '{"group":"g","stream":1,"prompt_len":9,"out_lens":[5,6],'
        f'"obs_lens":{observed}],"tool_times":[{waited}}}\n',
    )
    assert trace.groups["g"][0] == Sample("g", 1, 9, (Turn(5, 2, 0.5), Turn(6)))


class TestVerlDumps:
    def test_groups_by_input_within_a_step(self, tmp_path: Path) -> None:
        lines = [
            '{"input":"abc","output":"xxxxxxx","step":1,"score":0.5}',
            '{"input":"abc","output":"","step":1}',
            '{"input":"abc","output":"x","step":2}',
            '{"input":"def","output":"x","step":2}',
        ]
        trace = imported(tmp_path, "\n".join(lines))
        assert [len(members) for members in trace.groups.values()] == [2, 1, 1]
        first, second = next(iter(trace.groups.values()))
        assert (first.prompt_tokens, first.response_tokens) == (1, 3)
        assert first.labels == {
            "step": "1",
            "score": "0.5",
            "tokens_counted_by": "characters / 3.3",
        }
        assert second.response_tokens == 1

    def test_groups_by_uid_and_counts_with_a_tokenizer(self, tmp_path: Path) -> None:
        lines = '{"input":"a b","output":"c d e","uid":"u"}\n{"input":"z","output":"y","uid":"u"}'
        trace = imported(tmp_path, lines, Counting(tokenizer=lambda text: len(text.split())))
        first = trace.groups["u"][0]
        assert len(trace.groups["u"]) == 2
        assert (first.prompt_tokens, first.response_tokens) == (2, 3)
        assert first.labels["tokens_counted_by"] == "tokenizer"


@pytest.mark.parametrize(
    ("text", "line", "field", "found"),
    [
        ("group_id,prompt_tokens,response_tokens\n1,2,3\n", 1, "sample_idx", "lacks: sample_idx"),
        (
            "group_id,sample_idx,prompt_tokens,response_tokens\n1,0,2,3.5\n",
            2,
            "response_tokens",
            "found '3.5'",
        ),
        ("group_id,sample_idx,prompt_tokens,response_tokens\n1,0,0,3\n", 2, "prompt_tokens", "'0'"),
        ("group_id,sample_idx,prompt_tokens,response_tokens\n1,0,,3\n", 2, "prompt_tokens", "''"),
        ("group_id,sample_idx,prompt_tokens,response_tokens\n1,0,2\n", 2, "", "3 values under 4"),
        (
            "group_id,sample_idx,prompt_tokens,response_tokens\n1,0,2,3\n1,0,2,4\n",
            3,
            "sample",
            "second time",
        ),
        (
            "group_id,sample_idx,prompt_tokens,response_tokens,truncated\n1,0,2,3,maybe\n",
            2,
            "truncated",
            "maybe",
        ),
        ("t_s,prompt_tokens,response_tokens\nnan,2,3\n", 2, "t_s", "'nan'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,2,3\n", 2, "TIMESTAMP", "'noon'"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,2,3\n2023-11-15,2,3\n",
            3,
            "TIMESTAMP",
            "sort",
        ),
        ('{"g":1,"s":0,"p":2,"t":[[1,2]]}', 1, "t", "[[1, 2]]"),
        ('{"g":1,"s":0,"p":2,"t":[[1,2,-3],[1,0,0]]}', 1, "t", "-3"),
        ('{"g":1,"s":0,"p":2,"t":[]}', 1, "t", "found []"),
        ('{"g":1,"s":0,"p":2,"t":[[3,0,0]]}\n{"g":1,"s":0,"p":2}', 2, "t", "missing"),
        ('{"g":1,"s":0,"p":2,"t":[[3,0,0]]}\n{"g":1,', 2, "", "malformed JSON"),
        ('{"g":1,"s":0,"p":2,"t":[[3,0,0]]}\n[4]', 2, "", "a JSON list"),
        (
            '{"group":"g","stream":0,"prompt_len":1,"out_lens":[1,2,3],"obs_lens":[1],'
            '"tool_times":[1,1]}',
            1,
            "obs_lens",
            "one value per turn",
        ),
        ('{"input":5.5,"output":["x"]}', 1, "output", "['x']"),
        ("q,input_tokens\n0.5,6\n", 1, "", "quantiles"),
        ("hello\nworld\n", 1, "", "no known trace format"),
        ('{"hello":1}\n', 1, "", "no known trace format"),
        ('{"x', 1, "", "malformed JSON"),
    ],
)
def test_a_bad_file_is_named_down_to_the_field(
    tmp_path: Path, text: str, line: int, field: str, found: str
) -> None:
    with pytest.raises(TraceError) as caught:
        imported(tmp_path, text)
    assert (caught.value.line, caught.value.field) == (line, field)
    assert "foreign.txt" in str(caught.value)
    assert found in str(caught.value)
