"""Importers: a bad file says where and why it cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_sched.simulators.traces import TraceError
from tests.simulators.traces.imported import imported


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
            "appears twice",
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


@pytest.mark.parametrize(
    "text",
    [
        "x" * 9000,
        f'{{"schema":"{"x" * 9000}"}}',
        f'{{"input":"x","output":{["x" * 9000]}}}'.replace("'", '"'),
        "group_id,sample_idx,prompt_tokens,response_tokens\n" + f"{'g' * 9000},0,1,2\n" * 2,
    ],
)
def test_an_error_is_short_however_long_the_file_s_words_are(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError) as caught:
        imported(tmp_path, text)
    assert len(str(caught.value)) < 2000
