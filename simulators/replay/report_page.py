"""The report of a replay as a page for a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_sched.page.run_page import DrawnRun, run_page
from rollout_sched.page.run_record import quantiles
from rollout_sched.simulators.replay.report_tables import about, cells
from rollout_sched.simulators.replay.runs import Run
from rollout_sched.simulators.replay.workload import Workload


def report_page(report: dict[str, Any], runs: Sequence[Sequence[Run]], workload: Workload) -> bytes:
    """`runs`: as in the report, the first of each policy with its record; `workload`: what they
    replay."""
    offered = [length for group in workload.groups for length in workload.offered(group)]
    several = report["seeds"] > 1
    return run_page(
        f"{report['trace']} on {report['scenario']}",
        [
            _drawn(policy, of_policy[0])
            for policy, of_policy in zip(report["policies"], runs, strict=True)
        ],
        about=[*about(report), *(["Figures are means over seeds; charts show seed 0."] * several)],
        verdict=report["verdict"],
        warnings=report["warnings"],
        tables=cells(report),
        offered=quantiles(offered),
    )


def _drawn(policy: Mapping[str, Any], run: Run) -> DrawnRun:
    assert run.record is not None, "`records` was not set"
    return DrawnRun(
        name=policy["name"],
        record=run.record,
        steps=policy["per_step"][0],
        idle=_means(policy["idle_bubble_by_cause"]),
        vacant=_means(policy["occupancy_bubble_by_cause"]),
        staleness=_means(policy["staleness"]["histogram"]),
    )


def _means(figures: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {key: figure["mean"] for key, figure in figures.items()}
