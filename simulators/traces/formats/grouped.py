"""Tables with one row per sample of a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rollout_sched.simulators.traces.model import (
    Counting,
    Finish,
    SamplePlace,
    SampleRecord,
    Turn,
)
from rollout_sched.simulators.traces.rows import Importer, Placed, Row

_REST = ("prompt_tokens", "response_tokens", "truncated", "arrival_s")


def _grouped(rows: Iterable[Row], _: Counting) -> Placed:
    """group_id, sample_idx, prompt_tokens, response_tokens [, truncated, arrival_s, labels...]."""
    for row in rows:
        labels = row.labels("group_id", "sample_idx", *_REST)
        yield _sample(row, row.text("group_id"), row.whole("sample_idx"), labels)


def _counted(rows: Iterable[Row], _: Counting) -> Placed:
    """group, prompt_tokens, response_tokens [, sample, truncated, arrival_s, labels...]. Samples
    without an index are counted within their group."""
    so_far: Counter[str] = Counter()
    for row in rows:
        group = row.text("group")
        index = row.whole("sample") if "sample" in row.fields else so_far[group]
        so_far[group] += 1
        yield _sample(row, group, index, row.labels("group", "sample", *_REST))


def _sample(
    row: Row, group: str, index: int, labels: dict[str, str]
) -> tuple[SamplePlace, SampleRecord]:
    sample = SampleRecord(
        group=group,
        sample=index,
        prompt_tokens=row.tokens("prompt_tokens"),
        turns=(Turn(row.tokens("response_tokens")),),
        arrival_s=row.seconds("arrival_s") if "arrival_s" in row.fields else 0.0,
        finish=_finish(row),
        labels=labels,
    )
    return row.place, sample


def _finish(row: Row) -> Finish:
    if "truncated" not in row.fields:
        return "unknown"
    flag = str(row.fields["truncated"]).strip().lower()
    if flag not in ("0", "1", "false", "true"):
        raise row.error("truncated", "expected 0 or 1")
    return "length" if flag in ("1", "true") else "stop"


GROUPED = Importer(
    "grouped CSV",
    frozenset({"group_id", "sample_idx", "prompt_tokens", "response_tokens"}),
    _grouped,
)
COUNTED = Importer(
    "lengths by group",
    frozenset({"group", "prompt_tokens", "response_tokens"}),
    _counted,
)
