"""Files appear whole or not at all, and equal traces give equal bytes."""

import math
from pathlib import Path

import pytest

from rollout_sched.simulators.traces import (
    Sample,
    Trace,
    TraceError,
    Turn,
    gather,
    write,
)
from rollout_sched.simulators.traces.synthetic import synthetic


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
