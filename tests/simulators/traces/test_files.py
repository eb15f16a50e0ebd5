"""Files appear whole or not at all, and equal traces give equal bytes."""

import gzip
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from backports import zstd

from benchmarks.synthetic import synthetic
from rollout_sched.simulators.traces import (
    SampleRecord,
    Trace,
    TraceError,
    Turn,
    files,
    gather,
    read,
    write,
)


class TestReading:
    @pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
    def test_a_file_that_was_cut_is_named_with_what_it_was(
        self, tmp_path: Path, pack: Callable[[bytes], bytes]
    ) -> None:
        rows = b"".join(b"%d,1,2\n" % n for n in range(20_000))
        path = tmp_path / "x"
        path.write_bytes(pack(b"t_s,prompt_tokens,response_tokens\n" + rows)[:-6])
        kind = "gzip" if pack is gzip.compress else "zstd"
        with pytest.raises(TraceError, match=f"x: damaged {kind}"):
            read(path)

    def test_zstd_without_the_library(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "x"
        path.write_bytes(zstd.compress(b"x"))
        for name in ("backports", "backports.zstd", "compression.zstd"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(TraceError, match=r"pip install .*\[zstd\]"):
            read(path)

    def test_a_line_without_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Some bytes of gzip unfold to as many gigabytes as they like."""
        monkeypatch.setattr(files, "LONGEST_LINE", 1000)
        path = tmp_path / "x"
        path.write_bytes(gzip.compress(b'{"input":"' + b"a" * 2000))
        with pytest.raises(TraceError, match="line 1: a line of 1000 bytes or more"):
            read(path)

    @pytest.mark.parametrize(
        "head",
        [
            "",
            "t_s,prompt_tokens,response_tokens\n1,2,3\n",
            '{"timestamp": 0, "input_length": 1, "output_length": 1}\n',
        ],
    )
    @pytest.mark.parametrize("blank", ["\n", "\r\n", "\u2003\x1c\n"])
    def test_blank_lines_are_not_read_to_their_end(
        self, tmp_path: Path, head: str, blank: str
    ) -> None:
        path = tmp_path / "x"
        path.write_bytes(gzip.compress((head + blank * 2**20).encode(), 1))
        with pytest.raises(TraceError, match="unpacks to more"):
            read(path)

    def test_rows_may_stand_apart(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        rows = "\n\n\n".join(f"{n},2,3" for n in range(50_000))
        path.write_text(f"t_s,prompt_tokens,response_tokens\n\n{rows}{chr(10) * 60_000}")
        assert len(read(path).groups) == 50_000


class TestWriting:
    @pytest.mark.parametrize(
        "bad",
        [
            SampleRecord("a", 1, 5, (Turn(0),)),
            SampleRecord("a", 1, 5, ()),
            SampleRecord("a", 1, 5, (Turn(1, 0, math.nan), Turn(1))),
            SampleRecord("a", 1, 5, (Turn(1, 3),)),
        ],
    )
    def test_an_unreadable_sample_leaves_the_old_file_alone(
        self, tmp_path: Path, bad: SampleRecord
    ) -> None:
        path = tmp_path / "t.jsonl.gz"
        path.write_bytes(b"old")
        trace = Trace("t", {"a": [SampleRecord("a", 0, 5, (Turn(1),)), bad]})
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
        twice = [SampleRecord("a", 0, 5, (Turn(1),))] * 2
        with pytest.raises(TraceError, match="appears twice"):
            gather(twice)
        with pytest.raises(TraceError, match="no samples"):
            gather([])
