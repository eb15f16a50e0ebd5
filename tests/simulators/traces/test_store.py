"""Reading traces, and the ones that are shipped."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from rollout_sched.simulators.traces import SampleRecord, TraceError, Turn, read, shipped
from rollout_sched.simulators.traces.command import statistics
from tests.simulators.traces.imported import imported

HEADER = '{"schema":"rollout-sched-trace/1","name":"tiny","max_response_tokens":100}'
GOOD = '{"group":"a","sample":0,"prompt_tokens":5,"turns":[[7]]}'


def native(folder: Path, *lines: str) -> Path:
    path = folder / "tiny.jsonl"
    path.write_text("\n".join((HEADER, *lines)) + "\n")
    return path


class TestReading:
    def test_groups_keep_first_appearance_and_samples_their_index(self, tmp_path: Path) -> None:
        path = native(
            tmp_path,
            '{"group":"b","sample":1,"prompt_tokens":5,"turns":[[7,2,0.5],[8]],"finish":"length"}',
            "",
            '{"group":"a","sample":0,"prompt_tokens":6,"turns":[[1]],"labels":{"model":"m"}}',
            '{"group":"b","sample":0,"prompt_tokens":5,"turns":[[9]],"arrival_s":2.5,"version":3}',
        )
        trace = read(path)
        assert trace.name == "tiny"
        assert list(trace.groups) == ["b", "a"]
        first, second = trace.groups["b"]
        assert first == SampleRecord("b", 0, 5, (Turn(9),), arrival_s=2.5, version=3)
        assert second.turns == (Turn(7, 2, 0.5), Turn(8))
        assert (second.response_tokens, second.tool_s, second.given_tokens) == (15, 0.5, 7)
        assert trace.groups["a"][0].labels == {"model": "m"}
        assert (trace.sample_count, trace.group_size, trace.cap) == (3, 2, 100)
        assert list(trace.head(1).groups) == ["b"]

    def test_gzip_and_byte_order_mark_are_found_by_content(self, tmp_path: Path) -> None:
        text = f"\ufeff{HEADER}\r\n{GOOD}\r\n"
        path = tmp_path / "no_suffix"
        path.write_bytes(gzip.compress(text.encode()))
        assert read(path).sample_count == 1

    def test_equal_labels_and_names_are_stored_once(self, tmp_path: Path) -> None:
        line = '{{"group":"a","sample":{},"prompt_tokens":5,"turns":[[7]],"labels":{{"k":"v"}}}}'
        one, two = read(native(tmp_path, line.format(0), line.format(1))).groups["a"]
        assert one.labels is two.labels
        assert one.group is two.group


class TestShipped:
    @pytest.mark.parametrize("name", shipped())
    def test_every_shipped_trace_has_credits_and_reads(self, name: str) -> None:
        trace = read(name)
        assert trace.name == name
        assert trace.about == shipped()[name]
        assert trace.source
        assert trace.license in {"Apache-2.0", "MIT", "Apache-2.0 AND CC0-1.0"}

    def test_the_recorded_statistics_of_the_token_economy(self) -> None:
        found = statistics(read("lrm_token_economy"))
        assert (found.samples, found.groups, found.group_size) == (2343, 470, 5)
        assert round(found.response_mean) == 4095
        assert round(found.response_p90) == 11930
        assert round(found.response_p99) == 24845
        assert found.response_cv == pytest.approx(1.37, abs=0.005)
        assert found.icc_log == pytest.approx(0.95, abs=0.005)

    def test_the_recorded_statistics_of_the_composite(self) -> None:
        found = statistics(read("composite_math_512x8"))
        assert (found.samples, found.groups, found.group_size) == (4096, 512, 8)
        assert found.response_mean == pytest.approx(6183, abs=1)
        assert found.response_p50 == pytest.approx(4055, abs=1)
        assert found.response_p90 == pytest.approx(14370, abs=1)
        assert found.response_p99 == pytest.approx(30509, abs=1)
        assert found.truncated_share == pytest.approx(0.009, abs=0.0005)

    def test_the_maths_selection_is_whole_groups(self) -> None:
        sizes = {len(members) for members in read("lrm_math_open").groups.values()}
        assert sizes == {5}

    def test_agents_have_turns_and_waits(self) -> None:
        found = statistics(read("composite_tau_256x8"))
        assert found.turns_mean > 10
        assert found.tool_s_mean > 30
        assert statistics(read("tau_airline")).tool_s_max == 0


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
        (GOOD, 1, "", 'write {"schema":"rollout-sched-trace/1"} as the first line'),
        ('{"group":"a","turns":[[7]]}', 1, "", "native trace without its header"),
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
