"""Draws a journal as a page for a browser."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_sched.inspection.recording import Recording
from rollout_sched.inspection.summary import metrics_of, summary
from rollout_sched.inspection.summary_rows import rows
from rollout_sched.page.run_fold import RunFold
from rollout_sched.page.run_page import DrawnRun, run_page


def journal_page(recording: Recording) -> bytes:
    """A page with the figures and the timeline of the run."""
    metrics, drawn = metrics_of(recording.slots()), RunFold(recording.waiting)
    found = summary(recording, metrics, [drawn.observe])
    run = DrawnRun(
        name=found["policy"],
        record=drawn.record(found["total_s"], metrics.curves),
        steps=found["per_step"],
        idle=found["idle_bubble_by_cause"],
        vacant=found["occupancy_bubble_by_cause"],
        staleness=found["staleness_histogram"],
    )
    return run_page(
        recording.path.name,
        [run],
        about=[f"Recorded under {found['policy']}, {found['instances']} instances."],
        tables=[_table(rows(found))],
    )


def _table(pairs: Sequence[tuple[str, str]]) -> dict[str, object]:
    return {
        "title": "Figures",
        "columns": [{"label": "", "means": ""}],
        "rows": [{"name": label.strip(), "cells": [shown]} for label, shown in pairs],
    }
