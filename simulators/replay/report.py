"""The report of a replay: one JSON document, and one table with the policies side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rollout_sched.simulators.replay.runs import Run, figures
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import Trace
from rollout_sched.whole_file import whole_file

SCHEMA = "rollout-sched-replay/1"

Format = Callable[[float], str]
Columns = Sequence[tuple[str, str, Format]]


def document(
    trace: Trace, scenario: Scenario, runs: Sequence[Sequence[Run]], *, steps: int, seeds: int
) -> dict[str, Any]:
    """The replay as data; docs/replay_json.md describes it."""
    load = Workload(trace, scenario.job, steps=steps, traffic=scenario.traffic)
    bounds = [run.offered_bound_s for run in runs[0]]
    return {
        "schema": SCHEMA,
        "trace": trace.name,
        "scenario": scenario.name,
        "prompts": len(load.prompts),
        "epochs": load.epochs,
        "groups": len(load.groups),
        "prompts_per_step": load.prompts_per_step,
        "samples_per_prompt": load.samples_per_prompt,
        "max_tokens": load.max_tokens,
        "seeds": seeds,
        "warnings": _warnings(load),
        **({} if load.traffic is None else {"conversations": len(load.traffic)}),
        "lower_bound": {
            "total_s": {
                "mean": sum(bounds) / len(bounds),
                "min": min(bounds),
                "max": max(bounds),
            }
        },
        "policies": [
            {
                "name": of_policy[0].policy,
                **figures(of_policy),
                "per_step": [msgspec.to_builtins(run.steps, str_keys=True) for run in of_policy],
            }
            for of_policy in runs
        ],
    }


def _warnings(load: Workload) -> list[str]:
    """What must be known before the figures are believed."""
    if not load.overlapping:
        return []
    return [
        f"{load.overlapping} of {len(load.groups)} groups train samples that another epoch trains "
        f"too, for the trace holds fewer than {load.epochs} x {load.samples_per_prompt} of a "
        f"prompt: history sees the future here, and what a policy gains by it is too good to be "
        f"true."
    ]


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write the report whole or not at all. Raises OSError if the place cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=2)
    with whole_file(path) as file:
        file.write(text + b"\n")


def tables(report: dict[str, Any]) -> list[Table]:
    """One line a policy. Three tables: speed, where the time and tokens went, what was trained; and
    what clients got, and what went wrong, where the scenario has such.

    Means over the seeds; half the range between seeds follows where it is 0.5 % or more.
    """
    first = report["policies"][0]["total_s"]["mean"]
    policies = [
        {**policy, "speed_up": _speed_up(first, policy["total_s"])} for policy in report["policies"]
    ]
    shown = dict(TABLES) if report["prompts"] else {INSTANCE_TIME: TABLES[INSTANCE_TIME]}
    shown |= {title: table for key, title, table in ROUGH if key in policies[0]}
    return [_table(title, columns, policies) for title, columns in shown.items()]


def _speed_up(first: float, total_s: dict[str, float]) -> dict[str, float]:
    slowest, fastest = total_s["max"], total_s["min"]
    return {"mean": first / total_s["mean"], "min": first / slowest, "max": first / fastest}


def heading(report: dict[str, Any]) -> str:
    """What was replayed, and what nobody can beat."""
    lines = []
    if report["prompts"]:
        bound = report["lower_bound"]["total_s"]["mean"]
        epochs = f"{report['epochs']} epochs x " if report["epochs"] > 1 else ""
        lines += [
            f"{report['prompts']} prompts x {epochs}{report['samples_per_prompt']} samples, "
            f"{report['prompts_per_step']} prompts a step, {report['seeds']} seed(s)",
            f"No policy can train this workload in less than {_seconds(bound)}.",
        ]
    else:
        lines.append(f"nobody trains, {report['seeds']} seed(s)")
    if "conversations" in report:
        lines.append(f"{report['conversations']} conversations of clients.")
    lines[0] = f"{report['trace']} on {report['scenario']}: {lines[0]}"
    lines += [f"WARNING: {warning}" for warning in report["warnings"]]
    return "\n".join(lines)


def footnote(report: dict[str, Any]) -> str:
    """Which policies needed more samples than the trace holds; empty if none did."""
    drawn = [
        f"{policy['name']} {_count(policy['samples_drawn']['mean'])}"
        for policy in report["policies"]
        if policy["samples_drawn"]["max"]
    ]
    if not drawn:
        return ""
    return (
        "Samples the trace does not hold were drawn from the other samples of their group: "
        + ", ".join(drawn)
    )


def _table(title: str, columns: Columns, policies: Sequence[dict[str, Any]]) -> Table:
    result = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    result.add_column("policy", no_wrap=True)
    for label, _, _ in columns:
        result.add_column(label, justify="right")
    for policy in policies:
        cells = (_cell(_at(policy, path), form) for _, path, form in columns)
        result.add_row(policy["name"], *cells)
    return result


def _at(policy: dict[str, Any], path: str) -> Any:
    value: Any = policy
    for key in path.split("."):
        value = value[key]
    return value


def _cell(figure: dict[str, float] | None, form: Format) -> str:
    if figure is None:
        return "-"
    half = (figure["max"] - figure["min"]) / 2
    spread = abs(half / figure["mean"]) if figure["mean"] else 0.0
    return form(figure["mean"]) + (f" \u00b1{100 * spread:.0f}%" if spread >= 0.005 else "")


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.1f} s"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _count(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.2f} M"
    return f"{value / 1e3:.1f} k" if value >= 1e4 else f"{value:,.0f}"


def _number(value: float) -> str:
    return f"{value:.2f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}x"


INSTANCE_TIME = "Where instance time and tokens went"
TABLES: dict[str, Columns] = {
    "Speed": (
        ("total", "total_s", _seconds),
        ("speed-up", "speed_up", _ratio),
        ("gap to bound", "gap_to_bound", _percent),
        ("gap as offered", "gap_to_offered_bound", _percent),
        ("rollout a step", "rollout_s", _seconds),
        ("t90 a step", "t90_s", _seconds),
        ("accepted tokens/s", "accepted_tokens_per_s", _count),
        ("trainer waits", "trainer_wait_s", _seconds),
    ),
    INSTANCE_TIME: (
        ("idle bubble", "idle_bubble", _percent),
        ("at the barrier", "idle_bubble_by_cause.barrier", _percent),
        ("queue empty", "idle_bubble_by_cause.queue_empty", _percent),
        ("weight update", "idle_bubble_by_cause.weight_update", _percent),
        ("tool wait", "idle_bubble_by_cause.tool_wait", _percent),
        ("occup. bubble", "occupancy_bubble", _percent),
        ("discarded", "discarded_tokens", _count),
        ("re-prefilled", "reprefilled_tokens", _count),
        ("preempted", "preemptions", _count),
    ),
    "What the trainer got": (
        ("stale mean", "staleness.mean", _number),
        ("max", "staleness.max", _count),
        ("newest tokens/s", "fresh_tokens_per_s", _count),
        ("length ratio", "length_bias.mean_ratio", _number),
        ("KS", "length_bias.ks", _number),
        ("KS a step", "length_bias.step_ks", _number),
        ("oldest prompt", "oldest_prompt_age_steps", _count),
        ("samples", "samples_delivered", _count),
        ("lost", "samples_lost", _count),
        ("drawn", "samples_drawn", _count),
    ),
}

#: By the key of the figures that a policy has only where the scenario has traffic or faults.
ROUGH: tuple[tuple[str, str, Columns], ...] = (
    (
        "direct",
        "What the clients got",
        (
            ("asked", "direct.submitted", _count),
            ("answered", "direct.answered", _count),
            ("withdrawn", "direct.withdrawn", _count),
            ("failed", "direct.failed", _count),
            ("tokens", "direct.tokens", _count),
            ("latency p50", "direct.latency_p50_s", _seconds),
            ("p99", "direct.latency_p99_s", _seconds),
            ("first token p50", "direct.first_token_p50_s", _seconds),
            ("p99", "direct.first_token_p99_s", _seconds),
        ),
    ),
    (
        "outages",
        "What went wrong",
        (
            ("instances lost", "outages.instances_lost", _count),
            ("left", "outages.instances_left", _count),
            ("returned", "outages.instances_returned", _count),
            ("away", "outages.away_s", _seconds),
            ("failed attempts", "outages.failed_attempts", _count),
            ("failed prompts", "outages.failed_prompts", _count),
        ),
    ),
)
