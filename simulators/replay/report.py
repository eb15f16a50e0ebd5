"""The report of a replay as data: one JSON document, or one row for each policy."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from rollout_sched.metrics import order_excess
from rollout_sched.page.run_page import DrawnRun, quantiles, run_page
from rollout_sched.simulators.replay.bounds import offered_bound, offered_on_policy_bound
from rollout_sched.simulators.replay.comparison import Compared, compared
from rollout_sched.simulators.replay.runs import Run, figures, spread
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import Trace
from rollout_sched.terminal import count, percent, seconds

SCHEMA = "rollout-sched-replay/1"

#: The most that the lengths of a step may differ from those of the whole trace, beyond chance.
_SORTED = 0.05

#: Figures that are not one value. They are in the JSON only.
_NESTED = ("per_step", "histogram")


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
        "warnings": [*_estimated(trace), *_warnings(load, runs)],
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


def _warnings(load: Workload, runs: Sequence[Sequence[Run]]) -> list[str]:
    """Reasons why the figures may mislead."""
    warnings = []
    if load.overlapping:
        warnings.append(
            f"{load.overlapping} of {len(load.groups)} groups train samples that another epoch "
            f"trains too, because the trace has fewer than {load.epochs} x "
            f"{load.samples_per_prompt} samples of a prompt. So history sees the future here: the "
            f"gain of a policy that uses it is overestimated."
        )
    if len(runs[0]) == 1 and load.groups and _order_excess(load) > _SORTED:
        warnings.append(
            "The trace is not in random order: the prompts of a step are more alike than by "
            "chance, and seed 0 keeps this order. Take --seeds 3: the other seeds shuffle it."
        )
    short = [run for run, *_ in runs if 0 < len(run.steps) < run.steps_needed]
    if short:
        names = ", ".join(f"{run.policy} {run.steps_needed}" for run in short)
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


def as_csv(report: dict[str, Any]) -> bytes:
    """One row per policy and one column per figure: its mean over the seeds, and `.min` and `.max`
    if they differ. The keys are those of the JSON, joined by dots."""
    rows = [dict(_cells(policy)) for policy in report["policies"]]
    file = io.StringIO()
    columns = dict.fromkeys(column for row in rows for column in row)
    writer = csv.DictWriter(file, list(columns), restval="")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def _cells(figures: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in figures.items():
        name = f"{before}{key}"
        if key in _NESTED:
            continue
        if not isinstance(value, dict):
            yield name, "" if value is None else value
        elif value.keys() == {"mean", "min", "max"}:
            yield name, value["mean"]
            if value["min"] != value["max"]:
                yield f"{name}.min", value["min"]
                yield f"{name}.max", value["max"]
        else:
            yield from _cells(value, f"{name}.")


# ------------------------------------------------------------------------------------------
# The report as text: tables that compare the policies, at most as wide as the terminal.
#
# No figure is ever cut: if the columns of a table do not fit, the table continues below. A legend
# below each table explains its figures.

Format = Callable[[Any], str]

GAP = "  "


class Column(NamedTuple):
    """label: the heading, whose words may be stacked. path: of the figure in a policy of the
    report, keys joined by dots. means: the explanation for the legend."""

    label: str
    path: str
    form: Format
    means: str


def number(value: float) -> str:
    text = f"{value:.2f}"
    return "0.00" if text == "-0.00" else text


def ratio(found: dict[str, float | None]) -> str:
    return f"{found['value']:.2f}x"


def interval(found: dict[str, float | None]) -> str:
    low, high = found["low"], found["high"]
    return ratio(found) + ("" if low is None else f" {low:.2f}-{high:.2f}")


INSTANCE_TIME = "Where instance time and tokens went"
TABLES: dict[str, Sequence[Column]] = {
    "Speed": (
        Column(
            "speed-up",
            "comparison.speed_up",
            interval,
            "trained tokens/s divided by those of the first policy; tokens count up to the number "
            "requested, so that training shorter samples brings no advantage",
        ),
        Column(
            "steady",
            "comparison.steady",
            interval,
            "the same, between the first step and the drain",
        ),
        Column("in time", "comparison.time", ratio, "speed-up in seconds of the whole run"),
        Column(
            "samples",
            "comparison.bias",
            str,
            "shorter: less was trained than requested, in the whole run or in its longest tenth; "
            "long last: everything was trained, but the long samples only at the end",
        ),
        Column("tokens/s", "equal_length_tokens_per_s", count, "trained, counted as for speed-up"),
        Column("total", "total_s", seconds, "until every prompt is trained"),
        Column("first step", "first_step_s", seconds, "until the first delivery"),
        Column("drain", "drain_s", seconds, "after the last step that launched a group"),
    ),
    "Time against the bounds": (
        Column(
            "gap to bound",
            "gap_to_bound",
            percent,
            "how far the total is above the bound that no policy can beat, for the samples that "
            "this policy delivered",
        ),
        Column("as offered", "gap_to_offered_bound", percent, "the same, for the requested ones"),
        Column(
            "at staleness 0",
            "gap_to_on_policy_bound",
            percent,
            "above the bound that no policy can beat at staleness 0",
        ),
        Column("rollout a step", "rollout_s", seconds, "per step, with requests in flight"),
        Column("t50 a step", "t50_s", seconds, "until 50 % of a step's batch was finished"),
        Column("t90", "t90_s", seconds, "until 90 % was finished"),
        Column("t99", "t99_s", seconds, "until 99 % was: the tail is between t90 and t99"),
        Column("trainer waits", "trainer_wait_s", seconds, "for batches, in total"),
    ),
    INSTANCE_TIME: (
        Column(
            "idle bubble",
            "idle_bubble",
            percent,
            "instance time with nothing in flight; the next four columns give causes",
        ),
        Column("at the barrier", "idle_bubble_by_cause.barrier", percent, "nothing may start yet"),
        Column(
            "queue empty", "idle_bubble_by_cause.queue_empty", percent, "nothing is left to start"
        ),
        Column("weight update", "idle_bubble_by_cause.weight_update", percent, "weights arrive"),
        Column("tool wait", "idle_bubble_by_cause.tool_wait", percent, "all wait for tools"),
        Column(
            "vacant places",
            "occupancy_bubble",
            percent,
            "of an even share of a batch on each instance",
        ),
        Column("discarded", "discarded_tokens", count, "tokens generated and thrown away"),
        Column("re-prefilled", "reprefilled_tokens", count, "tokens whose KV had existed before"),
        Column("preempted", "preemptions", count, "requests, for lack of KV memory"),
    ),
    "What the trainer got": (
        Column("stale mean", "staleness.mean", number, "versions, over the samples"),
        Column("stale max", "staleness.max", count, "of any sample"),
        Column(
            "newest tokens/s",
            "fresh_tokens_per_s",
            count,
            "trained tokens that the trainer's current version generated",
        ),
        Column("masked", "masked_tokens", count, "too old: delivered, but not trained"),
        Column(
            "length ratio", "length_bias.mean_ratio", number, "mean length trained over offered"
        ),
        Column(
            "steady ratio",
            "length_bias.steady_mean_ratio",
            number,
            "the same, between the first step and the drain",
        ),
        Column(
            "longest tenth",
            "length_bias.longest_tenth_kept",
            percent,
            "share of the longest tenth offered that was trained",
        ),
        Column(
            "step KS - chance",
            "comparison.step_ks_excess",
            number,
            "how much the lengths of a step differ from all lengths, beyond chance: a high value "
            "is a curriculum by length",
        ),
        Column(
            "oldest prompt",
            "oldest_prompt_age_steps",
            count,
            "most steps from a prompt's first dispatch to its training",
        ),
        Column("samples", "samples_delivered", count, "trained"),
        Column("lost", "samples_lost", count, "always 0"),
        Column("filtered", "filtered_groups", count, "groups that were judged and not kept"),
        Column("drawn", "samples_drawn", count, "copies of others of the prompt; too few recorded"),
    ),
}

#: Tables for figures that a policy has only if the scenario has what they measure, by their key.
ROUGH: tuple[tuple[str, str, Sequence[Column]], ...] = (
    (
        "drafted_tokens",
        "What instances drafted",
        (
            Column("drafted", "drafted_tokens", count, "tokens"),
            Column(
                "accepted", "draft_acceptance", percent, "of them: the model would have made them"
            ),
        ),
    ),
    (
        "weights",
        "How new weights arrived",
        (
            Column("sync", "weights.sync_s", seconds, "from publication until all have them"),
            Column(
                "exposed", "weights.exposed_s", seconds, "stop of an instance for them, per step"
            ),
        ),
    ),
    (
        "direct",
        "What the clients got",
        (
            Column("asked", "direct.submitted", count, "requests of clients"),
            Column("answered", "direct.answered", count, "of them"),
            Column("withdrawn", "direct.withdrawn", count, "the client disconnected"),
            Column("failed", "direct.failed", count, "no instance answered"),
            Column("tokens", "direct.tokens", count, "of the answers"),
            Column("latency p50", "direct.latency_p50_s", seconds, "from request to answer"),
            Column("latency p99", "direct.latency_p99_s", seconds, "the slowest hundredth"),
            Column(
                "first token p50",
                "direct.first_token_p50_s",
                seconds,
                "from request to the first reported token",
            ),
            Column("first token p99", "direct.first_token_p99_s", seconds, "the slowest hundredth"),
        ),
    ),
    (
        "outages",
        "What went wrong",
        (
            Column("instances lost", "outages.instances_lost", count, "without warning"),
            Column("left", "outages.instances_left", count, "instances that were drained"),
            Column("returned", "outages.instances_returned", count, "instances that came back"),
            Column("away", "outages.away_s", seconds, "instance-seconds until they returned"),
            Column("failed attempts", "outages.failed_attempts", count, "retried elsewhere"),
            Column("failed prompts", "outages.failed_prompts", count, "could not be completed"),
            Column("restarts", "outages.scheduler_restarts", count, "of the scheduler"),
        ),
    ),
)


def tables(report: dict[str, Any], width: int, *, equal_bias: bool = False) -> str:
    """One line per policy. Four tables: speed, time against the bounds, where time and tokens went,
    what was trained. If the scenario has them: also new weights, what clients got, what went wrong.

    Figures are means over the seeds. Times, rates and counts are followed by half the range between
    seeds if it is 0.5 % or more. Ratios are to the first policy, with intervals if prompts were
    resampled. With `equal_bias`, a policy whose samples do not have the requested lengths shows no
    ratios.
    """
    policies = report["policies"]
    if equal_bias:
        policies = [_without_ratios(policy) for policy in policies]
    shown = _shown(report)
    return "\n\n".join(_table(title, shown[title], policies, width) for title in shown)


def cells(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The tables of the report as data: titles, columns with their explanations, rows of texts."""
    return [
        {
            "title": title,
            "columns": [{"label": each.label, "means": each.means} for each in columns],
            "rows": [
                {
                    "name": policy["name"],
                    "cells": [_cell(at(policy, each.path), each.form) for each in columns],
                }
                for policy in report["policies"]
            ],
        }
        for title, columns in _shown(report).items()
    ]


def _shown(report: dict[str, Any]) -> dict[str, Sequence[Column]]:
    shown = dict(TABLES) if report["prompts"] else {INSTANCE_TIME: TABLES[INSTANCE_TIME]}
    return shown | {title: table for key, title, table in ROUGH if _has(report, key)}


def _has(report: dict[str, Any], key: str) -> bool:
    found = report["policies"][0].get(key)
    return found is not None and found.get("max") != 0


def _without_ratios(policy: dict[str, Any]) -> dict[str, Any]:
    comparison = policy["comparison"]
    if not comparison["bias"]:
        return policy
    hidden = dict.fromkeys(("speed_up", "time", "steady"))
    return {**policy, "comparison": comparison | hidden}


def _table(
    title: str, columns: Sequence[Column], policies: Sequence[dict[str, Any]], width: int
) -> str:
    names = _names([policy["name"] for policy in policies], width)
    cells = [[_cell(at(policy, c.path), c.form) for policy in policies] for c in columns]
    widths = [
        max(map(len, (*column.label.split(), *texts)))
        for column, texts in zip(columns, cells, strict=True)
    ]
    lines = [title]
    for first, last in _parts(widths, width - len(names[0])):
        lines += ["", *_header(columns[first:last], widths[first:last], len(names[0]))]
        for row, name in enumerate(names):
            values = [f"{cells[c][row]:>{widths[c]}}" for c in range(first, last)]
            lines.append(GAP.join([name, *values]).rstrip())
    legend = "; ".join(f"{column.label} = {column.means}" for column in columns)
    return "\n".join([*lines, "", *wrapped(f"{legend}.", width, before="  ")])


def _names(names: Sequence[str], width: int) -> list[str]:
    """Padded to equal length; a name longer than a third of the line is cut in the middle."""
    most = max(12, width // 3)
    short = [
        n if len(n) <= most else f"{n[: most // 2 - 1]}...{n[-(most - most // 2 - 2) :]}"
        for n in names
    ]
    longest = max(len("policy"), *map(len, short))
    return [f"{name:{longest}}" for name in short]


def _parts(widths: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """The ranges of columns that fit side by side."""
    starts, used = [0], 0
    for place, width in enumerate(widths):
        used += len(GAP) + width
        if used > room and place > starts[-1]:
            starts.append(place)
            used = len(GAP) + width
    return pairwise([*starts, len(widths)])


def _header(columns: Sequence[Column], widths: Sequence[int], first: int) -> Iterator[str]:
    above = [
        textwrap.wrap(column.label, width, break_on_hyphens=False)
        for column, width in zip(columns, widths, strict=True)
    ]
    height = max(map(len, above))
    padded = [[*[""] * (height - len(words)), *words] for words in above]
    for line in range(height):
        label = "policy" if line == height - 1 else ""
        words = [f"{words[line]:>{width}}" for words, width in zip(padded, widths, strict=True)]
        yield GAP.join([f"{label:{first}}", *words]).rstrip()
    yield "-" * (first + sum(len(GAP) + width for width in widths))


def wrapped(text: str, width: int, *, before: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=before, subsequent_indent=before)


def at(policy: dict[str, Any], path: str) -> Any:
    value: Any = policy
    for key in path.split("."):
        value = value[key]
    return value


def _cell(figure: Any, form: Format) -> str:
    if figure is None:
        return "-"
    if not isinstance(figure, dict) or "value" in figure:
        return form(figure)
    half = (figure["max"] - figure["min"]) / 2
    spread = abs(half / figure["mean"]) if figure["mean"] else 0.0
    shown = spread >= 0.005 and form not in (percent, number)
    return form(figure["mean"]) + (f" \u00b1{100 * spread:.0f}%" if shown else "")


def heading(report: dict[str, Any], width: int) -> str:
    """What was replayed, its bounds, and the warnings."""
    lines = [*about(report), *(f"WARNING: {warning}" for warning in report["warnings"])]
    return "\n".join(part for line in lines for part in wrapped(line, width))


def about(report: dict[str, Any]) -> list[str]:
    """What was replayed, and its bounds: one paragraph each."""
    lines = []
    if report["prompts"]:
        bound = report["lower_bound"]
        total_s, on_policy = bound["total_s"]["mean"], bound["on_policy"]
        epochs = f"{report['epochs']} epochs x " if report["epochs"] > 1 else ""
        lines += [
            f"{report['prompts']} prompts x {epochs}{report['samples_per_prompt']} samples, "
            f"{report['prompts_per_step']} prompts a step, {report['seeds']} seed(s)",
            f"No policy can train this workload in less than {seconds(total_s)}; at staleness 0 "
            f"in less than {seconds(on_policy['whole_batches_s']['mean'])} "
            f"({seconds(on_policy['parts_s']['mean'])} if the trainer takes parts of a batch).",
        ]
    else:
        lines.append(f"no training, {report['seeds']} seed(s)")
    if "conversations" in report:
        lines.append(f"{report['conversations']} conversations of clients.")
    lines[0] = f"{report['trace']} on {report['scenario']}: {lines[0]}"
    return lines


def footnote(report: dict[str, Any], width: int) -> str:
    """How certain the ratios are, and which policies needed more samples than the trace has."""
    lines = []
    if report["prompts"]:
        first, resamples = report["policies"][0]["name"], report["resamples"]
        lines += [
            f"Ratios are to {first} (--baseline chooses another).",
            f"Intervals: 95 %, from {resamples} resamples of the prompts."
            if resamples
            else "No intervals: --resamples 12 shows how much of a ratio may be chance.",
        ]
        if any(policy["comparison"]["bias"] for policy in report["policies"]):
            lines.append("--equal-bias compares only samples of equal length.")
    drawn = [
        f"{policy['name']} {count(policy['samples_drawn']['mean'])}"
        for policy in report["policies"]
        if policy["samples_drawn"]["max"]
    ]
    if drawn:
        lines.append(
            "The trace has too few samples; missing ones were drawn from the rest of their group: "
            + ", ".join(drawn)
        )
    return "\n".join(part for line in lines for part in wrapped(line, width))


def report_page(report: dict[str, Any], runs: Sequence[Sequence[Run]], workload: Workload) -> bytes:
    """The report of a replay as a page for a browser. `runs`: as in the report, the first of each
    policy with its record; `workload`: what they replay."""
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
