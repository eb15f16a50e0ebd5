"""A table with one row per sample of a group."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_sched.simulators.traces.model import Counting, Finish, SampleRecord, Turn
from rollout_sched.simulators.traces.rows import Importer, Placed, Row


def _convert(rows: Iterable[Row], _: Counting) -> Placed:
    """group_id, sample_idx, prompt_tokens, response_tokens [, truncated, arrival_s, labels...]."""
    used = ("group_id", "sample_idx", "prompt_tokens", "response_tokens", "truncated", "arrival_s")
    for row in rows:
        yield (
            row.place,
            SampleRecord(
                group=row.text("group_id"),
                sample=row.whole("sample_idx"),
                prompt_tokens=row.tokens("prompt_tokens"),
                turns=(Turn(row.tokens("response_tokens")),),
                arrival_s=row.seconds("arrival_s") if "arrival_s" in row.fields else 0.0,
                finish=_finish(row),
                labels=row.labels(*used),
            ),
        )


def _finish(row: Row) -> Finish:
    if "truncated" not in row.fields:
        return "unknown"
    flag = row.text("truncated").strip().lower()
    if flag not in ("0", "1", "false", "true"):
        raise row.error("truncated", "expected 0 or 1")
    return "length" if flag in ("1", "true") else "stop"


GROUPED = Importer(
    "grouped CSV",
    frozenset({"group_id", "sample_idx", "prompt_tokens", "response_tokens"}),
    _convert,
)
