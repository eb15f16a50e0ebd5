"""The report of a replay: one JSON document, and tables with the policies side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rollout_sched.metrics.length_bias import order_excess
from rollout_sched.simulators.replay.comparison import Compared, compared
from rollout_sched.simulators.replay.run_bounds import offered_bound, offered_on_policy_bound
from rollout_sched.simulators.replay.runs import Run, figures, spread
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import Trace
from rollout_sched.whole_file import whole_file

SCHEMA = "rollout-sched-replay/1"

#: How much further than by chance the steps of a trace may be from all of it.
_SORTED = 0.05

Format = Callable[[Any], str]
Columns = Sequence[tuple[str, str, Format]]


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
    comparison = compared(runs, resamples)
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
        "resamples": len(resamples[0]) if resamples else 0,
        "warnings": _warnings(load, runs),
        **({} if load.traffic is None else {"conversations": len(load.traffic)}),
        "lower_bound": _lower_bound(trace, scenario, steps, seeds),
        "policies": [
            {
                "name": of_policy[0].policy,
                "max_staleness": of_policy[0].max_staleness,
                "comparison": _without_name(beside_first),
                **figures(of_policy),
                "per_step": [msgspec.to_builtins(run.steps, str_keys=True) for run in of_policy],
            }
            for of_policy, beside_first in zip(runs, comparison, strict=True)
        ],
    }


def _without_name(policy: Compared) -> dict[str, Any]:
    figures: dict[str, Any] = msgspec.to_builtins(policy)
    del figures["name"]
    return figures


def _lower_bound(trace: Trace, scenario: Scenario, steps: int, seeds: int) -> dict[str, Any]:
    """Of the workload as offered, over the seeds."""
    loads = [Workload(trace, scenario.job, steps=steps, seed=seed) for seed in range(seeds)]
    on_policy = [offered_on_policy_bound(load, scenario) for load in loads]
    return {
        "total_s": spread([offered_bound(load, scenario) for load in loads]),
        "on_policy": spread([msgspec.to_builtins(bound) for bound in on_policy]),
    }


def _warnings(load: Workload, runs: Sequence[Sequence[Run]]) -> list[str]:
    """What must be known before the figures are believed."""
    warnings = []
    if load.overlapping:
        warnings.append(
            f"{load.overlapping} of {len(load.groups)} groups train samples that another epoch "
            f"trains too, for the trace holds fewer than {load.epochs} x "
            f"{load.samples_per_prompt} of a prompt: history sees the future here, and what a "
            f"policy gains by it is too good to be true."
        )
    if len(runs[0]) == 1 and load.groups and _order_excess(load) > _SORTED:
        warnings.append(
            "The trace is not in random order: the prompts of a step are more alike than by "
            "chance, and seed 0 trains them so. Take --seeds 3: the others are shuffled."
        )
    short = [run for run, *_ in runs if 0 < len(run.steps) < run.steps_needed]
    if short:
        names = ", ".join(f"{run.policy} {run.steps_needed}" for run in short)
        warnings.append(
            f"{len(short[0].steps)} steps are too few: it is mostly the first step and the drain "
            f"that are measured, and with more steps policies change places. At least 4 (S + 1) "
            f"are needed where samples may be S versions old ({names}): take more prompts or "
            f"--epochs, or fewer --prompts-per-step."
        )
    return warnings


def _order_excess(load: Workload) -> float:
    size = load.prompts_per_step
    offered = [load.offered(group) for group in load.groups]
    return order_excess([offered[at : at + size] for at in range(0, len(offered), size)])


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write the report whole or not at all. Raises OSError if the place cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=2)
    with whole_file(path) as file:
        file.write(text + b"\n")


def tables(report: dict[str, Any], *, equal_bias: bool = False) -> list[Table]:
    """One line a policy. Four tables: speed, time against the bounds, where time and tokens went,
    what was trained; and what clients got, and what went wrong, where the scenario has such.

    Means over the seeds; half the range between seeds follows times, rates and counts where it is
    0.5 % or more. Ratios are to the first policy, with their intervals where prompts were
    resampled. With `equal_bias` none are shown of a policy whose samples are not of the lengths
    that were asked for.
    """
    policies = report["policies"]
    if equal_bias:
        policies = [_without_ratios(policy) for policy in policies]
    shown = dict(TABLES) if report["prompts"] else {INSTANCE_TIME: TABLES[INSTANCE_TIME]}
    shown |= {title: table for key, title, table in ROUGH if key in policies[0]}
    return [_table(title, columns, policies) for title, columns in shown.items()]


def _without_ratios(policy: dict[str, Any]) -> dict[str, Any]:
    comparison = policy["comparison"]
    if not comparison["bias"]:
        return policy
    hidden = dict.fromkeys(("speed_up", "time", "steady"))
    return {**policy, "comparison": comparison | hidden}


def heading(report: dict[str, Any]) -> str:
    """What was replayed, and what nobody can beat."""
    lines = []
    if report["prompts"]:
        bound = report["lower_bound"]
        total_s, on_policy = bound["total_s"]["mean"], bound["on_policy"]
        epochs = f"{report['epochs']} epochs x " if report["epochs"] > 1 else ""
        lines += [
            f"{report['prompts']} prompts x {epochs}{report['samples_per_prompt']} samples, "
            f"{report['prompts_per_step']} prompts a step, {report['seeds']} seed(s)",
            f"No policy can train this workload in less than {_seconds(total_s)}; none at "
            f"staleness 0 in less than {_seconds(on_policy['whole_batches_s']['mean'])} "
            f"({_seconds(on_policy['parts_s']['mean'])} where the trainer takes parts of a batch).",
        ]
    else:
        lines.append(f"nobody trains, {report['seeds']} seed(s)")
    if "conversations" in report:
        lines.append(f"{report['conversations']} conversations of clients.")
    lines[0] = f"{report['trace']} on {report['scenario']}: {lines[0]}"
    lines += [f"WARNING: {warning}" for warning in report["warnings"]]
    return "\n".join(lines)


def footnote(report: dict[str, Any]) -> str:
    """How to read the tables, and which policies needed more samples than the trace holds."""
    lines = []
    if report["prompts"]:
        first, resamples = report["policies"][0]["name"], report["resamples"]
        lines += [
            f"Ratios are to {first}. speed-up: trained tokens/s, counted as no more than were "
            f"asked for; steady: those between the first step and the drain; in time: seconds of "
            f"the run, which flatters who trains shorter samples.",
            f"Intervals: 95 %, from {resamples} resamples of the prompts."
            if resamples
            else "No intervals: --resamples 12 says how much of a ratio is luck of the prompts.",
        ]
        if any(policy["comparison"]["bias"] for policy in report["policies"]):
            lines.append(
                "shorter: trained less than was asked for; long last: the long samples only at the "
                "end. --equal-bias compares only what is equal."
            )
    drawn = [
        f"{policy['name']} {_count(policy['samples_drawn']['mean'])}"
        for policy in report["policies"]
        if policy["samples_drawn"]["max"]
    ]
    if drawn:
        lines.append(
            "Samples the trace does not hold were drawn from the other samples of their group: "
            + ", ".join(drawn)
        )
    return "\n".join(lines)


def _table(title: str, columns: Columns, policies: Sequence[dict[str, Any]]) -> Table:
    result = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    result.add_column("policy", no_wrap=True)
    for label, _, form in columns:
        result.add_column(label, justify="right", no_wrap=form is _interval)
    for policy in policies:
        cells = (_cell(_at(policy, path), form) for _, path, form in columns)
        result.add_row(policy["name"], *cells)
    return result


def _at(policy: dict[str, Any], path: str) -> Any:
    value: Any = policy
    for key in path.split("."):
        value = value[key]
    return value


def _cell(figure: Any, form: Format) -> str:
    if figure is None:
        return "-"
    if not isinstance(figure, dict):
        return form(figure)
    if "value" in figure:
        return form(figure)
    half = (figure["max"] - figure["min"]) / 2
    spread = abs(half / figure["mean"]) if figure["mean"] else 0.0
    shown = spread >= 0.005 and form not in (_percent, _number)
    return form(figure["mean"]) + (f" \u00b1{100 * spread:.0f}%" if shown else "")


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


def _ratio(ratio: dict[str, float | None]) -> str:
    return f"{ratio['value']:.2f}x"


def _interval(ratio: dict[str, float | None]) -> str:
    low, high = ratio["low"], ratio["high"]
    return _ratio(ratio) + ("" if low is None else f" {low:.2f}-{high:.2f}")


INSTANCE_TIME = "Where instance time and tokens went"
TABLES: dict[str, Columns] = {
    "Speed": (
        ("steady", "comparison.steady", _interval),
        ("speed-up", "comparison.speed_up", _interval),
        ("in time", "comparison.time", _ratio),
        ("samples", "comparison.bias", str),
        ("tokens/s", "equal_length_tokens_per_s", _count),
        ("total", "total_s", _seconds),
        ("first step", "first_step_s", _seconds),
        ("drain", "drain_s", _seconds),
    ),
    "Time against the bounds": (
        ("gap to bound", "gap_to_bound", _percent),
        ("as offered", "gap_to_offered_bound", _percent),
        ("at staleness 0", "gap_to_on_policy_bound", _percent),
        ("rollout a step", "rollout_s", _seconds),
        ("t50 a step", "t50_s", _seconds),
        ("t90", "t90_s", _seconds),
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
        ("verified", "verified_tokens", _count),
        ("length ratio", "length_bias.mean_ratio", _number),
        ("steady", "length_bias.steady_mean_ratio", _number),
        ("longest tenth", "length_bias.longest_tenth_kept", _percent),
        ("step KS - chance", "comparison.step_ks_excess", _number),
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
