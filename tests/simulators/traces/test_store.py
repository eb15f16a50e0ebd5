"""Reading traces, and the ones that are shipped."""

import gzip
from pathlib import Path

import pytest

from rollout_sched.simulators.traces import SampleRecord, Turn, read, shipped
from rollout_sched.simulators.traces.statistics import statistics

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
