"""The tables of a replay, as text at most as wide as the terminal: one that answers, and the rest.

No figure and no name is ever cut: a long name stands above its figures, and columns that do not fit
continue below. Columns whose figures are all 0 are omitted. A legend explains the others.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rollout_sched.simulators.replay.comparison import FRONTIER, staleness_allowed
from rollout_sched.terminal import count, percent, seconds

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
    return ratio(found) + ("" if low == high else f" {low:.2f}-{high:.2f}")


def number_interval(found: dict[str, float | None]) -> str:
    return interval(found).replace("x", "")


def percent_interval(found: dict[str, float | None]) -> str:
    value, low, high = found["value"], found["low"], found["high"]
    assert value is not None
    if low is None or high is None or low == high:
        return percent(value)
    return f"{percent(value)} {100 * low:.0f}-{100 * high:.0f}"


_SPEED_UP = (
    "tokens/s over the first policy's, 95 % confidence interval; more than requested do not count"
)
SPEED_UP = Column("speed-up", "comparison.speed_up", interval, _SPEED_UP)
TOKENS = Column("tokens/s", "equal_length_tokens_per_s", count, "trained, counted as for speed-up")
STALENESS = (
    Column("stale mean", "staleness.mean", number, "versions behind, over the samples"),
    Column("stale max", "staleness.max", count, "of any sample"),
)
_TENTH = "trained samples as long as the longest tenth of the requested ones, over those"
LONGEST_TENTH = Column("longest tenth", "comparison.longest_tenth_kept", percent_interval, _TENTH)
_LIMIT = "what instances wait for, with the share of their time; or what is busy"

#: What a reader decides by.
ANSWER = (
    *(SPEED_UP, *STALENESS, LONGEST_TENTH, TOKENS),
    Column("limited by", "limited_by", str, _LIMIT),
)

_BIAS = "shorter: less was trained than requested; long last: the long samples only at the end"
_STEP_KS = (
    "how much a step's lengths differ from all, beyond chance: if much, a curriculum by length"
)

#: What a trainer has of it.
TRAINING: dict[str, Sequence[Column]] = {
    "Speed": (
        SPEED_UP,
        Column("steady", "comparison.steady", interval, "between the first step and the drain"),
        Column("in time", "comparison.time", ratio, "speed-up in seconds of the whole run"),
        Column("samples", "comparison.bias", str, _BIAS),
        TOKENS,
        Column("total", "total_s", seconds, "until every prompt is trained"),
        Column("first step", "first_step_s", seconds, "until the first delivery"),
        Column("drain", "drain_s", seconds, "after the last step that launched a group"),
    ),
    "Time against the bounds": (
        Column("gap to bound", "gap_to_bound", percent, "of the total, for the samples delivered"),
        Column("as requested", "gap_to_offered_bound", percent, "the same, for the requested ones"),
        Column("at staleness 0", "gap_to_on_policy_bound", percent, "to the bound at staleness 0"),
        Column("rollout a step", "rollout_s", seconds, "per step, with requests in flight"),
        Column("t50 a step", "t50_s", seconds, "until 50 % of a step's batch was finished"),
        Column("t90", "t90_s", seconds, "until 90 % was finished"),
        Column("t99", "t99_s", seconds, "until 99 % was: the tail is between t90 and t99"),
        Column("trainer waits", "trainer_wait_s", seconds, "for batches, in total"),
    ),
    "What the trainer got": (
        *STALENESS,
        Column("newest tokens/s", "fresh_tokens_per_s", count, "made by the trainer's own version"),
        Column("masked", "masked_tokens", count, "too old: delivered, but not trained"),
        Column("length ratio", "comparison.mean_ratio", number_interval, "trained over requested"),
        Column("steady ratio", "length_bias.steady_mean_ratio", number, "of the steady steps"),
        LONGEST_TENTH,
        Column("step KS - chance", "comparison.step_ks_excess", number, _STEP_KS),
        Column(
            "oldest prompt", "oldest_prompt_age_steps", count, "steps from dispatch to training"
        ),
        Column("samples", "samples_delivered", count, "trained"),
        Column("filtered", "filtered_groups", count, "groups that were judged and not kept"),
        Column("drawn", "samples_drawn", count, "lengths that were drawn: too few recorded"),
    ),
}

_IDLE = "idle_bubble_by_cause"

#: What instances and clients have of it, with training or without.
SERVING: dict[str, Sequence[Column]] = {
    "Where instance time and tokens went": (
        Column("idle", "idle_bubble", percent, "nothing in flight; the next columns give causes"),
        Column("at the barrier", f"{_IDLE}.barrier", percent, "nothing may start yet"),
        Column("queue empty", f"{_IDLE}.queue_empty", percent, "nothing is left to start"),
        Column("weight update", f"{_IDLE}.weight_update", percent, "weights arrive"),
        Column("tool wait", f"{_IDLE}.tool_wait", percent, "all wait for tools"),
        Column("empty slots", "occupancy_bubble", percent, "of an even share of a batch on each"),
        Column("discarded", "discarded_tokens", count, "tokens generated and thrown away"),
        Column("re-prefilled", "reprefilled_tokens", count, "tokens whose KV had existed before"),
        Column("preempted", "preemptions", count, "requests, for lack of KV memory"),
        Column("drafted", "drafted_tokens", count, "tokens"),
        Column("accepted", "draft_acceptance", percent, "of the drafted tokens"),
    ),
    "What the clients got": (
        Column("requested", "direct.submitted", count, "calls of clients"),
        Column("answered", "direct.answered", count, "of them"),
        Column("withdrawn", "direct.withdrawn", count, "the client disconnected"),
        Column("failed", "direct.failed", count, "no instance answered"),
        Column("tokens", "direct.tokens", count, "of the answers"),
        Column("latency p50", "direct.latency_p50_s", seconds, "from request to answer"),
        Column("latency p99", "direct.latency_p99_s", seconds, "the slowest hundredth"),
        Column("first token p50", "direct.first_token_p50_s", seconds, "until it was reported"),
        Column("first token p99", "direct.first_token_p99_s", seconds, "the slowest hundredth"),
    ),
    "What went wrong": (
        Column("instances lost", "outages.instances_lost", count, "without warning"),
        Column("left", "outages.instances_left", count, "instances that were drained"),
        Column("returned", "outages.instances_returned", count, "instances that came back"),
        Column("away", "outages.away_s", seconds, "instance-seconds until they returned"),
        Column("failed attempts", "outages.failed_attempts", count, "retried elsewhere"),
        Column("failed prompts", "outages.failed_prompts", count, "could not be completed"),
        Column("restarts", "outages.scheduler_restarts", count, "of the scheduler"),
    ),
}


def answer(report: dict[str, Any], width: int) -> str:
    """The table that a reader decides by. Policies of equal staleness stand together, the fastest
    of them first; `*` marks the Pareto frontier."""
    policies = in_order(report["policies"])
    names = [f"{'*' if one['on_frontier'] else ' '} {one['name']}" for one in policies]
    columns = _telling(ANSWER, policies)
    first, resamples = report["policies"][0]["name"], report["resamples"]
    return "\n".join(
        [
            *grid(columns, names, policies, width)[1:],
            "",
            *wrapped(legend(columns), width),
            *wrapped(f"* Pareto frontier: {FRONTIER}.", width),
            *wrapped(
                f"The first policy is {first} (--baseline chooses another)."
                + (
                    f" Intervals are from {resamples} resamples of the prompts."
                    if resamples
                    else " No confidence intervals: add --resamples 12."
                ),
                width,
            ),
        ]
    )


def tables(report: dict[str, Any], width: int) -> str:
    """All other figures, one line per policy.

    They are means over the seeds. Times, rates and counts are followed by half the range between
    seeds if it is 0.5 % or more.
    """
    policies = report["policies"]
    names = [policy["name"] for policy in policies]
    return "\n\n".join(
        "\n".join(
            [
                title,
                *grid(columns, names, policies, width),
                "",
                *wrapped(legend(columns), width, before="  "),
            ]
        )
        for title, columns in _shown(report).items()
    )


def in_order(policies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of equal staleness together, the fastest of them first."""
    return sorted(policies, key=lambda one: (staleness_allowed(one), -at(one, TOKENS.path)["mean"]))


def cells(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The tables of the report as data, each with its title."""
    return [
        {"title": title, **table_cells(columns, report["policies"])}
        for title, columns in _shown(report).items()
    ]


def table_cells(columns: Sequence[Column], policies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A table as data: its columns with their explanations, and rows of texts."""
    telling = _telling(columns, policies)
    return {
        "columns": [{"label": each.label, "means": each.means} for each in telling],
        "rows": [
            {
                "name": policy["name"],
                "cells": [cell(at(policy, each.path), each.form) for each in telling],
            }
            for policy in policies
        ],
    }


def _shown(report: dict[str, Any]) -> dict[str, Sequence[Column]]:
    shown = TRAINING | SERVING if report["prompts"] else SERVING
    telling = {title: _telling(columns, report["policies"]) for title, columns in shown.items()}
    return {title: columns for title, columns in telling.items() if columns}


def _telling(columns: Sequence[Column], policies: Sequence[dict[str, Any]]) -> list[Column]:
    """Those with a figure that is not 0."""
    return [
        each for each in columns if not all(_is_zero(at(policy, each.path)) for policy in policies)
    ]


def _is_zero(figure: Any) -> bool:
    if isinstance(figure, dict) and "max" in figure:
        return not (figure["min"] or figure["max"])
    return not figure


def grid(
    columns: Sequence[Column], names: Sequence[str], rows: Sequence[dict[str, Any]], width: int
) -> list[str]:
    """The lines of a table: for each row its name and its figures. A name has its own line if the
    figures fit side by side only so."""
    texts = [[cell(at(row, column.path), column.form) for row in rows] for column in columns]
    widths = [
        max(map(len, (*column.label.split(), *of_column)))
        for column, of_column in zip(columns, texts, strict=True)
    ]
    figures = sum(len(GAP) + width for width in widths)
    beside = width - figures
    room = beside if beside >= len("policy") else width // 3
    first = max([len("policy"), *(len(name) for name in names if len(name) <= room)])
    lines = []
    for begin, end in _parts(widths, width - first):
        lines += ["", *_header(columns[begin:end], widths[begin:end], first)]
        for row, name in enumerate(names):
            values = [f"{texts[place][row]:>{widths[place]}}" for place in range(begin, end)]
            if len(name) > first:
                lines += wrapped(name, width)
                name = ""
            lines.append(GAP.join([f"{name:{first}}", *values]).rstrip())
    return lines


def legend(columns: Sequence[Column]) -> str:
    return "; ".join(f"{column.label} = {column.means}" for column in columns) + "."


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
    """The figure; None if the policy has none."""
    value: Any = policy
    for key in path.split("."):
        value = value and value.get(key)
    return value


def cell(figure: Any, form: Format) -> str:
    if figure is None:
        return "-"
    if not isinstance(figure, dict) or "value" in figure:
        return form(figure)
    half = (figure["max"] - figure["min"]) / 2
    spread = abs(half / figure["mean"]) if figure["mean"] else 0.0
    shown = spread >= 0.005 and form not in (percent, number)
    return form(figure["mean"]) + (f" \u00b1{100 * spread:.0f}%" if shown else "")


def heading(report: dict[str, Any], width: int) -> str:
    """What was replayed, and the warnings."""
    lines = [*about(report), *(f"WARNING: {warning}" for warning in report["warnings"])]
    return "\n".join(part for line in lines for part in wrapped(line, width))


def about(report: dict[str, Any]) -> list[str]:
    """The workload and the scenario: one paragraph each."""
    size = "no training"
    if report["prompts"]:
        epochs = f"{report['epochs']} epochs x " if report["epochs"] > 1 else ""
        size = (
            f"{report['prompts']} prompts x {epochs}{report['samples_per_prompt']} samples, "
            f"{report['prompts_per_step']} prompts a step"
        )
    if "conversations" in report:
        size += f", {report['conversations']} conversations of clients"
    lines = [
        f"{report['trace']}: {size}, {report['seeds']} seed{'s' * (report['seeds'] > 1)}.",
        f"{report['scenario']}: {report['scenario_about']}".removesuffix(": "),
    ]
    if report["guessed_share"]:
        lines.append(
            f"{percent(report['guessed_share'])} of the tokens were not recorded: samples that "
            f"were cut are completed from the lengths of the others, by each seed differently."
        )
    return lines


def bounds(report: dict[str, Any], width: int) -> str:
    """What no policy can beat; nothing without training."""
    if not report["prompts"]:
        return ""
    bound = report["lower_bound"]
    whole_s, parts_s = (
        bound["on_policy"][f"{how}_s"]["mean"] for how in ("whole_batches", "parts")
    )
    text = (
        f"No policy can train this workload in less than {seconds(bound['total_s']['mean'])}; at "
        f"staleness 0 in less than {seconds(whole_s)} ({seconds(parts_s)} if the trainer takes "
        f"parts of a batch)."
    )
    return "\n".join(wrapped(text, width))
