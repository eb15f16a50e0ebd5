"""The report of a grid of replays as a page for a browser: a table, and a chart of the frontier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_sched.page.assembly import page
from rollout_sched.simulators.replay.report_tables import at
from rollout_sched.simulators.replay.sweep_report import COLUMNS, rows_of, shown

#: The axes that speed is drawn against: key, label, and the path of the figure in a row.
_AXES = (
    ("staleness", "staleness, mean versions", "staleness.mean.mean"),
    ("bias", "bias of a step, KS beyond chance", "comparison.step_ks_excess"),
    ("missing", "longest tenth not trained, %", "length_bias.longest_tenth_kept.mean"),
    ("gpus", "GPUs", "gpus"),
    ("instances", "instances in the fleet", "instances"),
)


def sweep_page(sweep: Mapping[str, Any]) -> bytes:
    """The page for the document of a sweep."""
    first = sweep["worlds"][0]
    rows = rows_of(sweep)
    points = [_point(row) for row in rows]
    differ = [axis for axis in _AXES if len({point[axis[0]] for point in points}) > 1]
    return page(
        f"{first['trace']}: {len(sweep['worlds'])} worlds",
        "sweep",
        {
            "title": f"{first['trace']}: {len(sweep['worlds'])} worlds",
            "about": [f"{first['groups']} groups, {len(rows)} replays."],
            "columns": [{"label": each.label, "means": each.means} for each in COLUMNS],
            "rows": [{"name": _marked(row), "cells": shown(row)} for row in rows],
            "axes": [{"key": key, "label": label} for key, label, _ in differ or _AXES[:1]],
            "points": points,
        },
    )


def _marked(row: dict[str, Any]) -> str:
    return f"* {row['label']}" if row["on_frontier"] else row["label"]


def _point(row: dict[str, Any]) -> dict[str, Any]:
    figures = {key: at(row, path) for key, _, path in _AXES}
    figures["missing"] = max(0.0, 100 * (1 - figures["missing"]))
    texts = zip(COLUMNS, shown(row), strict=True)
    return {
        "name": row["label"],
        "frontier": row["on_frontier"],
        "tokens_per_s": at(row, "equal_length_tokens_per_s.mean"),
        **{key: max(0.0, figure) for key, figure in figures.items()},
        "said": [row["label"], *(f"{column.label}: {text}" for column, text in texts)],
    }
