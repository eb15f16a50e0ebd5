"""The figures of a journal to read."""

from __future__ import annotations

from pathlib import Path

from rollout_sched.inspection.recording import Recording
from rollout_sched.inspection.summary import rows, summary
from tests.inspection.journals import recorded


def test_rows(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    recorded(path, "areal")
    found = summary(Recording(path))
    shown = dict(rows(found))
    assert shown["samples delivered"] == "48"
    assert "  answered" not in shown, "nobody asked for a response by itself"
    found["direct"] = {**found["direct"], "submitted": 3, "answered": 2}
    assert dict(rows(found))["  answered"] == "2"
