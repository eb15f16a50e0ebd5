"""The report of a replay: one JSON document, and one table with the policies side by side."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from rollout_sched.simulators.replay import Run, figures, offered_bound
from rollout_sched.simulators.scenario import Scenario
from rollout_sched.simulators.trace_model import Trace
from rollout_sched.simulators.workload import Workload

SCHEMA = "rollout-sched-replay/1"

Format = Callable[[float], str]


def document(
    trace: Trace, scenario: Scenario, runs: Sequence[Sequence[Run]], *, steps: int, seeds: int
) -> dict[str, Any]:
    """The replay as data; docs/replay_json.md describes it."""
    workloads = [Workload(trace, scenario.job, steps=steps, seed=seed) for seed in range(seeds)]
    bounds = [offered_bound(workload, scenario) for workload in workloads]
    load = workloads[0]
    return {
        "schema": SCHEMA,
        "trace": trace.name,
        "scenario": scenario.name,
        "prompts": len(load.prompts),
        "prompts_per_step": load.prompts_per_step,
        "samples_per_prompt": load.samples_per_prompt,
        "max_tokens": load.max_tokens,
        "seeds": seeds,
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


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write the report whole or not at all. Raises OSError if the place cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=2)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text + b"\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def table(report: dict[str, Any]) -> Table:
    """Policies as columns, figures as rows: mean over the seeds, half the spread behind it."""
    policies = report["policies"]
    bound = report["lower_bound"]["total_s"]["mean"]
    result = Table(
        title=(
            f"{report['trace']} on {report['scenario']}: {report['prompts']} prompts x "
            f"{report['samples_per_prompt']}, {report['prompts_per_step']} prompts a step"
        ),
        caption=f"no policy can train this workload in less than {_seconds(bound)}",
    )
    result.add_column("")
    for policy in policies:
        result.add_column(policy["name"].replace("_", "_\u200b"), justify="right")
    first = policies[0]["total_s"]["mean"]
    result.add_row("total", *(_cell(p["total_s"], _seconds) for p in policies))
    result.add_row(
        "speed-up over the first",
        *(f"{first / p['total_s']['mean']:.2f}x" for p in policies),
        end_section=True,
    )
    for label, path, form in ROWS:
        result.add_row(label, *(_cell(_at(policy, path), form) for policy in policies))
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
    mean = form(figure["mean"])
    return mean if half < 1e-9 * max(1.0, abs(figure["mean"])) else f"{mean} \u00b1 {form(half)}"


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


ROWS: tuple[tuple[str, str, Format], ...] = (
    ("gap to the bound", "gap_to_bound", _percent),
    ("gap, workload as offered", "gap_to_offered_bound", _percent),
    ("rollout per step", "rollout_s", _seconds),
    ("t90 per step", "t90_s", _seconds),
    ("accepted tokens/s", "accepted_tokens_per_s", _count),
    ("  of the current version", "fresh_tokens_per_s", _count),
    ("idle bubble", "idle_bubble", _percent),
    ("  at the barrier", "idle_bubble_by_cause.barrier", _percent),
    ("  queue empty", "idle_bubble_by_cause.queue_empty", _percent),
    ("  weight update", "idle_bubble_by_cause.weight_update", _percent),
    ("occupancy bubble", "occupancy_bubble", _percent),
    ("trainer waits", "trainer_wait_s", _seconds),
    ("discarded tokens", "discarded_tokens", _count),
    ("re-prefilled tokens", "reprefilled_tokens", _count),
    ("preemptions", "preemptions", _count),
    ("staleness mean", "staleness.mean", _number),
    ("staleness max", "staleness.max", _count),
    ("length bias, mean ratio", "length_bias.mean_ratio", _number),
    ("length bias, KS", "length_bias.ks", _number),
    ("length bias, KS per step", "length_bias.step_ks", _number),
    ("oldest prompt, steps", "oldest_prompt_age_steps", _count),
    ("samples delivered", "samples_delivered", _count),
    ("samples lost", "samples_lost", _count),
    ("samples drawn", "samples_drawn", _count),
)
