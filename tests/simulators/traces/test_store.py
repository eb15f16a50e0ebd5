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


class TestArrivals:
    """Counted from the earliest, by whatever clock and in whatever order."""

    @pytest.mark.parametrize("start", [0, 7, 19_440_110, 1_732_602_000, 1_732_602_000_000])
    @pytest.mark.parametrize(
        "columns",
        [
            "t_s,prompt_tokens,response_tokens",
            "arrived_at,num_prefill_tokens,num_decode_tokens",
            "Timestamp,Request tokens,Response tokens",
        ],
    )
    def test_of_tables(self, tmp_path: Path, columns: str, start: int) -> None:
        unit = 1000 if start > 1e11 else 1
        rows = "".join(f"{start + at * unit},5,{at + 1}\n" for at in (3, 0, 8))
        samples = list(imported(tmp_path, f"{columns}\n{rows}").samples())
        assert [(s.arrival_s, s.response_tokens) for s in samples] == [(0, 1), (3, 4), (8, 9)]

    @pytest.mark.parametrize(
        ("start", "unit"),
        [(0, 1000), (60_000, 1000), (1_732_602_000, 1), (1_732_602_000_000, 1000)],
    )
    def test_of_mooncake(self, tmp_path: Path, start: int, unit: int) -> None:
        row = '{{"timestamp":{},"input_length":5,"output_length":6}}\n'
        text = "".join(row.format(start + at * unit) for at in (3, 0, 8))
        arrivals = [sample.arrival_s for sample in imported(tmp_path, text).samples()]
        assert arrivals == pytest.approx([0, 3, 8])

    def test_of_groups(self, tmp_path: Path) -> None:
        columns = "group_id,sample_idx,prompt_tokens,response_tokens,arrival_s"
        text = f"{columns}\na,0,5,6,1732602009\nb,0,5,6,1732602000\n"
        trace = imported(tmp_path, text)
        assert [(s.group, s.arrival_s) for s in trace.samples()] == [("b", 0), ("a", 9)]

    def test_of_a_native_trace_only_if_they_are_unix_times(self, tmp_path: Path) -> None:
        line = GOOD[:-1] + ',"arrival_s":%d}'
        assert read(native(tmp_path, line % 7)).groups["a"][0].arrival_s == 7
        assert read(native(tmp_path, line % 1_732_602_000)).groups["a"][0].arrival_s == 0


class TestFailedRequests:
    @pytest.mark.parametrize("bad", ["0", "0.0", ""])
    def test_rows_of_tables_are_left_out_and_counted(self, tmp_path: Path, bad: str) -> None:
        text = f"group_id,sample_idx,prompt_tokens,response_tokens\na,0,5,6\na,1,5,{bad}\na,2,0,7\n"
        trace = imported(tmp_path, text)
        assert (trace.sample_count, trace.left_out) == (1, 2)
        assert statistics(trace).left_out == 2

    @pytest.mark.parametrize(
        ("good", "bad"),
        [
            ('{"g":3,"s":0,"p":9,"t":[[5,2,1],[0,0,0]]}', '{"g":3,"s":1,"p":9,"t":[[0,0,0]]}'),
            (
                '{"id":"a","requests":[{"t":0,"in":5,"out":6}]}',
                '{"id":"b","requests":[{"t":1,"in":0,"out":0}]}',
            ),
            (
                '{"timestamp":0,"input_length":5,"output_length":6}',
                '{"timestamp":1,"input_length":5,"output_length":null}',
            ),
            (
                '{"ts":1,"request_id":"a","prompt_tokens":5,"output_tokens":6}',
                '{"ts":1,"request_id":"a","prompt_tokens":5,"output_tokens":0}',
            ),
            (
                '{"submit_ts":1,"finalized_ts":2,"generate_s":1}',
                '{"submit_ts":1,"finalized_ts":2,"generate_s":null}',
            ),
            ('{"input":"a","output":""}', '{"input":"a","output":null}'),
        ],
    )
    def test_rows_of_json_are_left_out_and_counted(
        self, tmp_path: Path, good: str, bad: str
    ) -> None:
        trace = imported(tmp_path, f"{good}\n{bad}\n")
        assert (trace.sample_count, trace.left_out) == (1, 1)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_with_line_breaks_in_labels(tmp_path: Path, end: str) -> None:
    lines = [
        "\ufeffgroup_id,sample_idx,prompt_tokens,response_tokens,text",
        'a,0,5,6,"x',
        "",
        'a ""y"""',
        "a,1,5,7,z",
        "",
    ]
    (tmp_path / "t.csv").write_bytes(end.join(lines).encode())
    one, two = read(tmp_path / "t.csv").groups["a"]
    assert one.labels == {"text": f'x{end}{end}a "y"'}
    assert (two.response_tokens, two.labels) == (7, {"text": "z"})


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
        ("group_id,prompt_tokens\n1,2\n", 1, "response_tokens", "lacks: response_tokens"),
        ("group_id,tokens\n1,2\n", 1, "", "no known trace format begins with 'group_id', 'tokens'"),
        (
            "group_id,sample_idx,prompt_tokens,response_tokens\n1,0,2,3.5\n",
            2,
            "response_tokens",
            "found '3.5'",
        ),
        (
            "group_id,sample_idx,prompt_tokens,response_tokens\n1,0,-1,3\n",
            2,
            "prompt_tokens",
            "'-1'",
        ),
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
        ("t_s,prompt_tokens,response_tokens\n0,2,3\n1732602000,2,3\n", 3, "", "one clock"),
        (
            "t_s,prompt_tokens,response_tokens\n0,2,0\n",
            None,
            "",
            "only requests without tokens (1)",
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
    tmp_path: Path, text: str, line: int | None, field: str, found: str
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
