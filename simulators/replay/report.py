"""The report of a replay as data: one JSON document, or one row for each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout_sched.metrics import order_excess
from rollout_sched.page.run_page import DrawnRun, quantiles, run_page
from rollout_sched.simulators.replay.bounds import offered_bound, offered_on_policy_bound
from rollout_sched.simulators.replay.comparison import Compared, compared, frontier, limited_by
from rollout_sched.simulators.replay.runs import Run, figures, spread
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.tables import (
    ANSWER,
    SPEED_UP,
    Column,
    about,
    at,
    cells,
    in_order,
    table_cells,
)
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import Trace

SCHEMA = "rollout-sched-replay/1"

#: The most that the lengths of a step may differ from those of the whole trace, beyond chance.
_SORTED = 0.05


def document(
    trace: Trace,
    scenario: Scenario,
    runs: Sequence[Sequence[Run]],
    *,
    steps: int,
    seeds: int,
    resamples: Sequence[Sequence[Run]] = (),
) -> dict[str, Any]:
    """The replay as data; docs/replay_json.md describes it."""
    load = Workload(trace, scenario.job, steps=steps, traffic=scenario.traffic)
    policies = [
        _policy(of_policy, beside_first)
        for of_policy, beside_first in zip(runs, compared(runs, resamples), strict=True)
    ]
    best = frontier(policies)
    for place, policy in enumerate(policies):
        policy["on_frontier"] = place in best
    return {
        "schema": SCHEMA,
        "trace": trace.name,
        "scenario": scenario.name,
        "scenario_about": scenario.about,
        "instances": scenario.fleet.instances,
        "prompts": len(load.prompts),
        "epochs": load.epochs,
        "groups": len(load.groups),
        "prompts_per_step": load.prompts_per_step,
        "samples_per_prompt": load.samples_per_prompt,
        "max_tokens": load.max_tokens,
        "seeds": seeds,
        "resamples": len(resamples[0]) if resamples else 0,
        "tokens_estimated_by": trace.estimated_by or None,
        "guessed_share": load.guessed_share,
        "warnings": [*_estimated(trace), *_without_prompts(trace), *_warnings(load, runs)],
        **({} if load.traffic is None else {"conversations": len(load.traffic)}),
        "lower_bound": _lower_bound(trace, scenario, steps, seeds),
        "policies": policies,
    }


def _policy(runs: Sequence[Run], comparison: Compared) -> dict[str, Any]:
    policy = {
        "name": runs[0].policy,
        "max_staleness": runs[0].max_staleness,
        "comparison": _without_name(comparison),
        **figures(runs),
        "per_step": [msgspec.to_builtins(run.steps, str_keys=True) for run in runs],
    }
    return {**policy, "limited_by": limited_by(policy)}


def _without_name(policy: Compared) -> dict[str, Any]:
    figures: dict[str, Any] = msgspec.to_builtins(policy)
    del figures["name"]
    return figures


def _lower_bound(trace: Trace, scenario: Scenario, steps: int, seeds: int) -> dict[str, Any]:
    """The bounds of the workload as offered, over the seeds."""
    loads = [Workload(trace, scenario.job, steps=steps, seed=seed) for seed in range(seeds)]
    on_policy = [offered_on_policy_bound(load, scenario) for load in loads]
    return {
        "total_s": spread([offered_bound(load, scenario) for load in loads]),
        "on_policy": spread([msgspec.to_builtins(bound) for bound in on_policy]),
    }


def _estimated(trace: Trace) -> list[str]:
    how = trace.estimated_by
    if not how:
        return []
    return [
        f"Tokens are estimated ({how}), because the trace has no token counts. --tokenizer "
        f"counts the tokens of texts; --tokens-per-s sets your generation speed."
    ]


def _without_prompts(trace: Trace) -> list[str]:
    if any(sample.prompt_tokens > 1 for sample in trace.samples()):
        return []
    return [
        "The trace has no lengths of prompts, so each counts as one token and costs no prefill. If "
        "your table has them, name their column: --columns prompt=..."
    ]


def _warnings(load: Workload, runs: Sequence[Sequence[Run]]) -> list[str]:
    """Reasons why the figures may mislead."""
    warnings = []
    if len(runs[0]) == 1 and load.groups and _order_excess(load) > _SORTED:
        warnings.append(
            "The trace is not in random order: the prompts of a step are more alike than by "
            "chance, and seed 0 keeps this order. Take --seeds 3: the other seeds shuffle it."
        )
    short = [run for run, *_ in runs if 0 < len(run.steps) < run.steps_needed]
    if short:
        most = sorted(short, key=lambda run: -run.steps_needed)[:3]
        names = ", ".join(f"{run.policy} {run.steps_needed}" for run in most)
        warnings.append(
            f"{len(short[0].steps)} steps are too few: the figures measure mostly the first step "
            f"and the drain, and more steps may change the ranking. If samples may be S versions "
            f"old, at least 4 (S + 1) steps are needed ({names}): take more prompts or --epochs, "
            f"or fewer --prompts-per-step."
        )
    return warnings


def _order_excess(load: Workload) -> float:
    size = load.prompts_per_step
    offered = [load.offered(group) for group in load.groups]
    return order_excess([offered[at : at + size] for at in range(0, len(offered), size)])


def as_json(report: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def report_page(
    report: dict[str, Any],
    runs: Sequence[Sequence[Run]],
    workload: Workload,
    made: Sequence[str] = (),
) -> bytes:
    """The report of a replay as a page for a browser. `runs`: as in the report, the first of each
    policy with its record; `workload`: what they replay; `made`: as in `run_page`."""
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
        answer=charted(ANSWER, in_order(report["policies"]), SPEED_UP, [STALENESS_AXIS])
        if report["prompts"]
        else None,
        serve=report["serve"],
        made=made,
    )


#: What speed is drawn against: a label, and the figure.
STALENESS_AXIS = ("staleness, versions on average", "staleness.mean")


def charted(
    columns: Sequence[Column],
    rows: Sequence[dict[str, Any]],
    speed: Column,
    axes: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """A table for a page, with a point for each row: its `speed` and interval, and its figure on
    each of the axes on which rows differ."""
    table = table_cells(columns, rows)
    points: list[dict[str, Any]] = [
        {
            "name": row["name"],
            "frontier": row["on_frontier"],
            "speed": _middle(at(row, speed.path)),
            "low": at(row, f"{speed.path}.low"),
            "high": at(row, f"{speed.path}.high"),
            "said": [row["name"], *_labelled(table["columns"], shown["cells"])],
            **{label: max(0.0, _middle(at(row, path))) for label, path in axes},
        }
        for row, shown in zip(rows, table["rows"], strict=True)
    ]
    differ = [label for label, _ in axes if len({point[label] for point in points}) > 1]
    return {**table, "speed": speed.label, "axes": differ, "points": points}


def _middle(figure: Any) -> float:
    """Of a ratio, of a figure over the seeds, or of a number."""
    middle: float = figure
    if isinstance(figure, dict):
        middle = figure["value" if "value" in figure else "mean"]
    return middle


def _labelled(columns: Sequence[dict[str, str]], texts: Sequence[str]) -> list[str]:
    return [f"{column['label']}: {text}" for column, text in zip(columns, texts, strict=True)]


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
