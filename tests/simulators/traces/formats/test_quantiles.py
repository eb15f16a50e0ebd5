"""Tables of quantiles say what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_sched.simulators.traces import TraceError
from tests.simulators.traces.imported import imported


@pytest.mark.parametrize("rows", ["0.5,6\n", "0.5,6\n0.9,7\n"])
def test_there_is_nothing_to_replay(tmp_path: Path, rows: str) -> None:
    with pytest.raises(TraceError, match=r"foreign\.txt, line 1: a table of quantiles"):
        imported(tmp_path, f"q,input_tokens\n{rows}")


def test_one_without_rows_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"foreign\.txt: no samples"):
        imported(tmp_path, "q,input_tokens\n")
