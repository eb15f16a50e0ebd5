"""The page of one run, or of several side by side, from a replay or a journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout_sched.metrics.attempt_spans import OUTCOMES
from rollout_sched.metrics.waits import CAUSES, SINCE
from rollout_sched.page.assembly import page
from rollout_sched.page.run_record import RunRecord

#: Most attempts on a page, so that a browser can open the file.
MOST = 400_000


class DrawnRun(msgspec.Struct):
    """The run of one policy. steps: as `metrics.Step`; idle, vacant: shares of the instances' time
    by cause; staleness: samples by staleness in versions."""

    name: str
    record: RunRecord
    steps: Sequence[Mapping[str, Any]]
    idle: Mapping[str, float]
    vacant: Mapping[str, float]
    staleness: Mapping[str, float]


def run_page(
    title: str,
    runs: Sequence[DrawnRun],
    *,
    about: Sequence[str] = (),
    verdict: Sequence[str] = (),
    warnings: Sequence[str] = (),
    tables: Sequence[Mapping[str, Any]] = (),
    offered: Sequence[int] = (),
) -> bytes:
    """The page. `about`, `verdict` and `warnings` are paragraphs; `tables` have a title, columns
    (label, means) and rows (name, cells); `offered` are quantiles of the offered lengths, as
    `RunRecord.lengths`."""
    runs, note = _fitting(runs)
    data = {
        "title": title,
        "about": about,
        "verdict": verdict,
        "warnings": warnings,
        "tables": tables,
        "policies": runs,
        "offered": offered,
        "note": note,
        "words": {"since": SINCE, "causes": CAUSES, "outcomes": OUTCOMES},
    }
    return page(title, "report", data)


def _fitting(runs: Sequence[DrawnRun]) -> tuple[Sequence[DrawnRun], str]:
    each = -(-sum(len(run.record) for run in runs) // MOST)
    if each <= 1:
        return runs, ""
    thinned = [msgspec.structs.replace(run, record=run.record.thinned(each)) for run in runs]
    return thinned, f"One request in {each} is drawn; figures and curves include all requests."
