"""Traces out of texts that a test gives."""

from __future__ import annotations

from pathlib import Path

from rollout_sched.simulators.traces import Counting, Trace, read


def imported(folder: Path, text: str, counting: Counting | None = None, **columns: str) -> Trace:
    path = folder / "foreign.txt"
    path.write_text(text)
    return read(path, counting, columns)
