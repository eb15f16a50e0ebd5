"""A trace may be a file, a folder, a pattern, standard input, packed or not."""

from __future__ import annotations

import gzip
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from backports import zstd

from rollout_sched.simulators.traces import TraceError, read
from rollout_sched.simulators.traces.files import sources_of

VERL = '{{"input":"p{0}","output":"x","step":{0}}}\n'
NATIVE = '{{"schema":"rollout-sched-trace/1","name":"n{0}","max_response_tokens":{0}00}}\n'
SAMPLE = '{{"group":"{0}","sample":0,"prompt_tokens":5,"turns":[[7]]}}\n'


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """As verl writes them: a file for each step."""
    folder = tmp_path / "dumps"
    (folder / ".cache").mkdir(parents=True)
    for step in (2, 1, 10):
        (folder / f"{step}.jsonl").write_text(VERL.format(step) * 2)
    (folder / "README.md").write_text("what this is")
    (folder / ".cache" / "3.jsonl").write_text("not a trace")
    return folder


def steps(source: str | Path) -> list[str]:
    return [members[0].labels["step"] for members in read(source).groups.values()]


def test_a_folder_is_one_trace_in_the_order_of_its_numbers(dumps: Path) -> None:
    assert steps(dumps) == ["1", "2", "10"]
    assert read(dumps).name == "dumps"
    assert [len(members) for members in read(dumps).groups.values()] == [2, 2, 2]


def test_a_pattern_is_one_trace(dumps: Path) -> None:
    assert steps(f"{dumps}/1*.jsonl") == ["1", "10"]
    assert steps(f"{dumps.parent}/**/*.jsonl") == ["1", "2", "10"]
    assert read(f"{dumps}/[12].jsonl").name == "dumps"
    with pytest.raises(TraceError, match="no file matches"):
        read(f"{dumps}/7*.jsonl")


def test_a_file_may_be_named_like_a_pattern(tmp_path: Path) -> None:
    path = tmp_path / "a[1].jsonl"
    path.write_text(VERL.format(3))
    assert steps(path) == ["3"]


def test_native_files_are_put_together(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / f"{name}.jsonl").write_text(NATIVE.format(name) + SAMPLE.format(name))
    trace = read(tmp_path)
    assert (trace.name, trace.max_response_tokens, list(trace.groups)) == ("n1", 200, ["1", "2"])


def test_the_same_sample_in_two_files_names_the_second(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / f"{name}.jsonl").write_text(NATIVE.format(name) + SAMPLE.format("a"))
    with pytest.raises(TraceError, match=r"2\.jsonl, line 2, field 'sample': .* appears twice"):
        read(tmp_path)


def test_an_error_names_the_file_it_is_in(dumps: Path) -> None:
    (dumps / "3.jsonl").write_text(VERL.format(3) + '{"input":"x"}\n')
    with pytest.raises(TraceError, match=r"3\.jsonl, line 2, field 'output': missing"):
        read(dumps)


@pytest.mark.parametrize("other", ["t_s,prompt_tokens,response_tokens\n0,1,2\n", NATIVE.format(1)])
def test_formats_are_not_mixed(dumps: Path, other: str) -> None:
    (dumps / "3.jsonl").write_text(other)
    with pytest.raises(TraceError, match=r"3\.jsonl, line 1: .*1\.jsonl is verl rollout dump"):
        read(dumps)
    (dumps / "0.jsonl").write_text(other)
    with pytest.raises(TraceError, match=r"1\.jsonl, line 1: verl rollout dump"):
        read(dumps)


def test_more_files_than_may_be_open(dumps: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for step in range(100, 1400):
        (dumps / f"{step}.jsonl").write_text(VERL.format(step))
    assert len(steps(dumps)) == 1303
    assert len(os.listdir("/proc/self/fd")) <= before + 1


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd.compress])
def test_packed_files_and_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack
) -> None:
    data = pack(VERL.format(4).encode())
    path = tmp_path / "4.jsonl.zst"
    path.write_bytes(data)
    assert (steps(path), read(path).name) == (["4"], "4")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    trace = read("-")
    assert (trace.name, trace.sample_count) == ("stdin", 1)


def test_empty_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    with pytest.raises(TraceError, match="<stdin>: the file is empty"):
        read("-")


def test_a_shipped_name_gives_way_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sources_of("lrm_math_open").files[0].where.endswith("lrm_math_open.jsonl.gz")
    (tmp_path / "lrm_math_open").write_text(VERL.format(5))
    assert steps("lrm_math_open") == ["5"]


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(VERL.format(1))
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("the superuser may read everything")
    with pytest.raises(TraceError, match="cannot be read"):
        read(path)
