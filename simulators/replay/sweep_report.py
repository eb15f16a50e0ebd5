"""The report of a grid of replays: one table over all of them, and the frontier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_sched.simulators.replay.report_tables import (
    GAP,
    Column,
    at,
    count,
    number,
    percent,
    seconds,
    wrapped,
)
from rollout_sched.simulators.replay.sweep import World

SCHEMA = "rollout-sched-sweep/1"

COLUMNS = (
    Column("inst.", "instances", count, "instances in the fleet"),
    Column("tokens/s", "equal_length_tokens_per_s.mean", count, "trained, up to the requested"),
    Column("total", "total_s.mean", seconds, "until every prompt is trained"),
    Column("stale mean", "staleness.mean.mean", number, "versions, over the samples"),
    Column("max", "staleness.max.max", count, "of any sample"),
    Column("longest tenth", "length_bias.longest_tenth_kept.mean", percent, "share trained"),
    Column("step KS", "comparison.step_ks_excess", number, "of a step against all, beyond chance"),
)

#: Figures of which less is better, each with the smallest difference that counts.
LESS = (("staleness.mean.mean", 0.1), ("comparison.step_ks_excess", 0.02), ("gpus", 1.0))


def document(reports: Sequence[Mapping[str, Any]], worlds: Sequence[World]) -> dict[str, Any]:
    """The report of each world, as a single `replay` would give it, and what was changed there;
    also which of their policies are on the frontier."""
    rows = [
        {**policy, "world": world.said, "gpus": _gpus(report, world)}
        for report, world in zip(reports, worlds, strict=True)
        for policy in report["policies"]
    ]
    best = _frontier(rows)
    return {
        "schema": SCHEMA,
        "worlds": [
            {"changed": world.said, "gpus": _gpus(report, world), **report}
            for report, world in zip(reports, worlds, strict=True)
        ],
        "frontier": [
            {"world": rows[place]["world"], "policy": rows[place]["name"]} for place in best
        ],
    }


def _gpus(report: Mapping[str, Any], world: World) -> int:
    """The GPUs that --split divided; without it, one per instance."""
    gpus: int = world.split or report["instances"]
    return gpus


def rows_of(sweep: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The figures of each policy in each world, fastest first, each with a `label` and the flag
    `on_frontier`."""
    on_frontier = {(one["world"], one["policy"]) for one in sweep["frontier"]}
    rows = [
        {
            **policy,
            "instances": world["instances"],
            "gpus": world["gpus"],
            "label": " | ".join(part for part in (policy["name"], world["changed"]) if part),
            "on_frontier": (world["changed"], policy["name"]) in on_frontier,
        }
        for world in sweep["worlds"]
        for policy in world["policies"]
    ]
    return sorted(rows, key=lambda row: -at(row, COLUMNS[1].path))


def shown(row: dict[str, Any]) -> list[str]:
    """One text for each of COLUMNS."""
    return [_cell(at(row, column.path), column) for column in COLUMNS]


def table(sweep: Mapping[str, Any], width: int) -> str:
    """One row for each policy in each world, fastest first; `*` marks those on the frontier."""
    rows = rows_of(sweep)
    cells = list(zip(*map(shown, rows), strict=True))
    widths = [
        max(map(len, (*column.label.split(), *texts)))
        for column, texts in zip(COLUMNS, cells, strict=True)
    ]
    lines = [f"  {_heading(widths, line)}" for line in (0, 1)]
    for place, row in enumerate(rows):
        mark = "*" if row["on_frontier"] else " "
        values = [f"{cells[c][place]:>{widths[c]}}" for c in range(len(COLUMNS))]
        name = row["label"]
        used = 2 + sum(widths) + len(GAP) * len(COLUMNS)
        whole = f"{mark} {GAP.join(values)}"
        lines += (
            [f"{whole}{GAP}{name}"]
            if used + len(name) <= width
            else [whole, *wrapped(name, width, before="      ")]
        )
    legend = "; ".join(f"{column.label} = {column.means}" for column in COLUMNS)
    frontier = (
        "* on the frontier: no other row is at least as good in speed, staleness, bias and GPUs, "
        "and better in one of them."
    )
    return "\n".join([*lines, "", *wrapped(f"{legend}.", width), *wrapped(frontier, width)])


def _heading(widths: Sequence[int], line: int) -> str:
    words = [["", *column.label.split()][-2:] for column in COLUMNS]
    return GAP.join(f"{two[line]:>{width}}" for two, width in zip(words, widths, strict=True))


def _cell(value: Any, column: Column) -> str:
    return "-" if value is None else column.form(value)


def _frontier(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """The indexes of the rows that no other row beats, fastest first."""
    scores = [_scores(row) for row in rows]
    best = [
        place
        for place, mine in enumerate(scores)
        if not any(
            other != mine and all(o >= m for o, m in zip(other, mine, strict=True))
            for other in scores
        )
    ]
    return sorted(best, key=lambda place: scores[place], reverse=True)


def _scores(row: Mapping[str, Any]) -> tuple[int, ...]:
    """Integers of which more is better, rounded to the differences that matter."""
    figures = dict(row)
    speed = at(figures, "equal_length_tokens_per_s.mean")
    return (
        round(100 * math.log(speed)) if speed else -(10**9),
        round(100 * at(figures, "length_bias.longest_tenth_kept.mean")),
        *(-round(at(figures, path) / fine) for path, fine in LESS),
    )
