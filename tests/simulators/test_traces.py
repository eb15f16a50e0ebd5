"""Traces: reading and refusing native files, shipped traces, statistics, made-up samples."""

import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from rollout_sched.simulators.trace_statistics import intraclass_correlation
from rollout_sched.simulators.traces import (
    Sample,
    Trace,
    TraceError,
    Turn,
    draw_extra,
    gather,
    read,
    shipped,
    statistics,
    synthetic,
    write,
)

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
        assert first == Sample("b", 0, 5, (Turn(9),), arrival_s=2.5, version=3)
        assert second.turns == (Turn(7, 2, 0.5), Turn(8))
        assert (second.response_tokens, second.tool_s, second.final_context) == (15, 0.5, 22)
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


class TestCutting:
    @pytest.mark.parametrize(
        ("cap", "turns"),
        [
            (1, (Turn(1),)),
            (7, (Turn(7),)),
            (8, (Turn(7, 2, 0.5), Turn(1))),
            (15, (Turn(7, 2, 0.5), Turn(8))),
        ],
    )
    def test_a_cap_cuts_the_turn_it_falls_into(self, cap: int, turns: tuple[Turn, ...]) -> None:
        sample = Sample("g", 0, 5, (Turn(7, 2, 0.5), Turn(8)))
        cut = sample.cut_at(cap)
        assert cut.turns == turns
        assert cut.response_tokens == cap
        assert cut.finish == ("stop" if cap == 15 else "length")


class TestRefusing:
    @pytest.mark.parametrize(
        ("line", "field", "found"),
        [
            ('{"group":"a","sample":0,"turns":[[7]]}', "prompt_tokens", "missing required"),
            (
                '{"group":"a","sample":0,"prompt_tokens":0,"turns":[[7]]}',
                "prompt_tokens",
                "found 0",
            ),
            (
                '{"group":"a","sample":0,"prompt_tokens":5,"turns":[[-7]]}',
                "turns[0][0]",
                "found -7",
            ),
            ('{"group":"a","sample":0,"prompt_tokens":5,"turns":[[7.5]]}', "turns[0][0]", "7.5"),
            ('{"group":"a","sample":0,"prompt_tokens":5,"turns":[]}', "turns", "found []"),
            ('{"group":"a","sample":0,"prompt_tokens":5,"turns":[[7,1]]}', "turns", "last turn"),
            ('{"group":"a","sample":0,"prompt_tokens":5,"turns":[[7,0,NaN],[1]]}', "", "NaN"),
            ('{"group":"a","sample":0,"prompt_tokens":5,"turns":[[7,0,-1],[1]]}', "[0][2]", "-1"),
            ('{"group":1,"sample":0,"prompt_tokens":5,"turns":[[7]]}', "group", "found 1"),
            ('{"group":"a","sample":true,"prompt_tokens":5,"turns":[[7]]}', "sample", "True"),
            (
                '{"group":"a","sample":0,"prompt_tokens":5,"turns":[[7]],"x":1}',
                "x",
                "unknown field",
            ),
            ('{"group":"a","sample":0,"prompt_tokens":5,"turns":[[1e12]]}', "turns[0][0]", "found"),
            (
                '{"group":"a","sample":0,"prompt_tokens":5,"turns":[[7]],"finish":"x"}',
                "finish",
                "x",
            ),
            ('{"group":"a","sample":0,"prompt', "", "malformed JSON"),
            ("[1, 2]", "", "found [1, 2]"),
            (GOOD, "sample", "second time"),
        ],
    )
    def test_a_bad_line_is_named(self, tmp_path: Path, line: str, field: str, found: str) -> None:
        path = native(tmp_path, GOOD, line)
        with pytest.raises(TraceError) as caught:
            read(path)
        error = caught.value
        assert (error.where, error.line) == (str(path), 3)
        assert field in error.field
        assert found in str(error)
        assert error.remedy
        assert "$" not in str(error)

    def test_another_schema_version(self, tmp_path: Path) -> None:
        path = tmp_path / "new.jsonl"
        path.write_text('{"schema":"rollout-sched-trace/2"}\n')
        with pytest.raises(TraceError, match=r"field 'schema'.*rollout-sched-trace/2.*upgrade"):
            read(path)

    def test_an_unknown_header_field(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text('{"schema":"rollout-sched-trace/1","nmae":"x"}\n')
        with pytest.raises(TraceError, match=r"field 'nmae'.*fields are schema, name"):
            read(path)

    @pytest.mark.parametrize("content", [b"", b"\n\n", HEADER.encode()])
    def test_nothing_in_it(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "empty.jsonl"
        path.write_bytes(content)
        with pytest.raises(TraceError, match=r"empty|no samples"):
            read(path)

    def test_wrong_encoding_names_the_line(self, tmp_path: Path) -> None:
        path = tmp_path / "latin.jsonl"
        path.write_bytes(HEADER.encode() + b'\n{"group":"\xe4"}\n')
        with pytest.raises(TraceError, match=r"line 2: byte 0xe4 .* UTF-8"):
            read(path)

    def test_a_cut_off_gzip(self, tmp_path: Path) -> None:
        path = tmp_path / "cut.jsonl.gz"
        path.write_bytes(gzip.compress(f"{HEADER}\n{GOOD}\n".encode())[:-12])
        with pytest.raises(TraceError, match="damaged gzip"):
            read(path)

    def test_a_missing_file_names_the_shipped_traces(self) -> None:
        with pytest.raises(TraceError, match=r"no such file.*lrm_math_open"):
            read("no_such_trace")

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="one file"):
            read(tmp_path)


class TestWriting:
    @pytest.mark.parametrize(
        "bad",
        [
            Sample("a", 1, 5, (Turn(0),)),
            Sample("a", 1, 5, ()),
            Sample("a", 1, 5, (Turn(1, 0, math.nan), Turn(1))),
            Sample("a", 1, 5, (Turn(1, 3),)),
        ],
    )
    def test_an_unreadable_sample_leaves_the_old_file_alone(
        self, tmp_path: Path, bad: Sample
    ) -> None:
        path = tmp_path / "t.jsonl.gz"
        path.write_bytes(b"old")
        trace = Trace("t", {"a": [Sample("a", 0, 5, (Turn(1),)), bad]})
        with pytest.raises(TraceError, match="group 'a', sample 1"):
            write(trace, path)
        assert path.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [path]

    def test_equal_traces_give_equal_bytes(self, tmp_path: Path) -> None:
        trace = synthetic(3, 2, seed=1)
        for name in ("a.gz", "b.gz"):
            write(trace, tmp_path / name)
        assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()

    def test_gather_refuses_a_duplicate_and_an_empty_trace(self) -> None:
        twice = [Sample("a", 0, 5, (Turn(1),))] * 2
        with pytest.raises(TraceError, match="second time"):
            gather(twice)
        with pytest.raises(TraceError, match="no samples"):
            gather([])


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


class TestIntraclassCorrelation:
    def test_the_textbook_value(self) -> None:
        # Shrout and Fleiss (1979), table 4: six targets, four judges, ICC(1,1) = 0.17.
        ratings = [
            [9, 2, 5, 8],
            [6, 1, 3, 2],
            [8, 4, 6, 8],
            [7, 1, 2, 6],
            [10, 5, 6, 9],
            [6, 2, 4, 7],
        ]
        values = np.array(ratings, dtype=np.float64).ravel()
        found = intraclass_correlation(values, np.repeat(np.arange(6), 4))
        assert found == pytest.approx(0.17, abs=0.005)

    def test_undefined_without_repeats_or_variance(self) -> None:
        assert intraclass_correlation(np.array([1.0, 2.0]), np.array([0, 1])) is None
        assert intraclass_correlation(np.array([1.0, 2.0]), np.array([0, 0])) is None
        assert intraclass_correlation(np.ones(4), np.array([0, 0, 1, 1])) is None


class TestMadeUpSamples:
    def test_an_extra_sample_is_one_of_its_group(self) -> None:
        trace = read("lrm_math_open")
        name, members = next(iter(trace.groups.items()))
        extras = [draw_extra(trace, name, index, seed=3) for index in range(5, 60)]
        assert [extra.sample for extra in extras] == list(range(5, 60))
        assert {extra.turns for extra in extras} == {member.turns for member in members}

    def test_extras_do_not_depend_on_the_order_of_asking_but_on_the_seed(self) -> None:
        trace = synthetic(2, 8, seed=0)
        once = [draw_extra(trace, "1", i, seed=3) for i in range(8, 40)]
        again = [draw_extra(trace, "1", i, seed=3) for i in reversed(range(8, 40))][::-1]
        other = [draw_extra(trace, "1", i, seed=4) for i in range(8, 40)]
        assert once == again
        assert once != other

    def test_extras_are_the_same_on_every_machine(self) -> None:
        trace = Trace("t", gather([Sample("g", i, 1, (Turn(i + 1),)) for i in range(8)]))
        drawn = [draw_extra(trace, "g", i, seed=0).response_tokens for i in range(8, 14)]
        assert drawn == [4, 1, 5, 4, 2, 8]

    def test_an_unknown_group(self) -> None:
        with pytest.raises(TraceError, match="no group 'x'"):
            draw_extra(synthetic(1, 1), "x", 1, 0)

    def test_synthetic_has_the_asked_shape(self) -> None:
        trace = synthetic(2000, 8, median=1000, sigma_between=0.8, sigma_within=0.5, cap=20_000)
        found = statistics(trace)
        assert (found.groups, found.group_size) == (2000, 8)
        assert found.response_p50 == pytest.approx(1000, rel=0.1)
        assert found.icc_log == pytest.approx(0.64 / 0.89, abs=0.03)
        assert found.response_max == 20_000 == trace.cap
        cut = [s for s in trace.samples() if s.finish == "length"]
        assert cut
        assert all(s.response_tokens == 20_000 for s in cut)
        assert synthetic(3, 2, seed=5) == synthetic(3, 2, seed=5) != synthetic(3, 2, seed=6)

    @pytest.mark.parametrize("wrong", [{"median": 0}, {"cap": 0}, {"sigma_within": -1}])
    def test_synthetic_refuses_nonsense(self, wrong: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="expected a number"):
            synthetic(1, 1, **wrong)
