"""Every preset on every shipped grouped trace in every plain scenario: `make zoo`.

What was run is kept in build/runs until the sources change, so a run that was interrupted goes on.
`python -m benchmarks.zoo --traces ... --scenarios ... --policies ...` takes a part of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, mean

from benchmarks.cells import Cell, command, default_jobs, run_all
from benchmarks.ratios import shown
from rollout_sched.config import load_policy, shipped
from rollout_sched.simulators.replay.comparison import Bias, Compared, compared
from rollout_sched.simulators.replay.runs import Run

KEPT = Path("build/runs")
BASELINE = "round_robin_sync"
SCENARIOS = (
    "qwen7b-8xh100",
    "qwen7b-8xh100-disaggregated",
    "qwen32b-16xh100",
    "qwen32b-16xh100-disaggregated",
)

#: Trace -> how often its prompts come, so that most runs have 20 steps and more.
TRACES = {
    "lrm_math_open": 5,
    "lrm_token_economy": 3,
    "composite_math_512x8": 3,
    "tau_airline": 5,
    "composite_tau_256x8": 3,
}

#: Where a run is long: the first of the scenarios are enough.
AGENTIC = {"tau_airline", "composite_tau_256x8"}
#: Prompts of a step where the trace has too few for 64.
PROMPTS_PER_STEP = {"composite_tau_256x8": 32}

HEAD = """# The zoo

    {command}

writes this page; `make zoo` writes the complete one: every shipped policy on every shipped grouped
trace in the plain scenarios.

**Protocol.** All policies train the same prompts to the end of the run, including deferred ones:
{epochs}. The fleet has no other traffic. Each ratio is relative to `{baseline}` on the same prompts
in the same order, {interval}. What starts over, and samples
of later epochs, have lengths that are drawn from a distribution fitted to the trace.

* **speed-up**: trained tokens per second, counted up to the offered length, so that a policy gains
  nothing by training shorter samples; **time**: the same ratio for the seconds of the whole run;
  **steady**: for trained tokens per second between the first step and the drain.
* **stale**: mean and maximum over the samples, in trainer steps.
* **trained**: mean trained length over mean offered length; **steady trained**: the same in the
  steps between the first and the drain; **tenth kept**: the trained share of the longest tenth;
  **step KS**: the Kolmogorov-Smirnov distance of a step's lengths from all lengths, above chance.
* **discarded**: tokens thrown away per trained token; **re-prefilled**: millions of tokens whose KV
  was computed again.

`!` after a name: the policy trained less than 0.99 of the offered length or kept less than 0.98 of
the longest tenth, so shorter samples are part of its speed. `~`: it trained all of it, but less
than 0.95 in the steady steps, because long samples come at the end.
"""

COLUMNS = (
    "policy",
    "speed-up",
    "time",
    "steady",
    "stale",
    "trained",
    "steady trained",
    "tenth kept",
    "step KS",
    "discarded",
    "re-prefilled",
)
MARKS: dict[Bias, str] = {"": "", "shorter": "!", "long last": "~"}

Table = Sequence[tuple[Compared, float]]  #: and millions of tokens that were prefilled again


def marks(policy: str) -> str:
    """`*` for who remembers prompts."""
    roles = load_policy(policy).build(lengths=lambda group, index: 0)
    return "*" if roles.uses_history else ""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    policies = sorted(options.policies, key=lambda name: (name != BASELINE, name))
    cells = {
        (scenario, trace, policy): _draws(policy, trace, scenario, options.draws)
        for trace in options.traces
        for scenario in options.scenarios
        if trace not in AGENTIC or scenario in SCENARIOS[: options.agentic]
        for policy in policies
    }
    runs = run_all([cell for drawn in cells.values() for cell in drawn], options.kept, options.jobs)
    by_place: dict[tuple[str, str], list[list[Run]]] = {}
    for (scenario, trace, _), drawn in cells.items():
        by_place.setdefault((scenario, trace), []).append([runs[cell] for cell in drawn])
    tables = {place: _table_of(drawn) for place, drawn in by_place.items()}
    text = "\n".join(_document(tables, policies, options))
    if options.out:
        options.out.write_text(text)
    else:
        print(text)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    names = shipped("policies/presets")
    parser.add_argument("--traces", nargs="+", default=list(TRACES), choices=TRACES)
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument("--policies", nargs="+", default=names, choices=names)
    parser.add_argument("--agentic", type=int, default=2, help="scenarios for agents' traces")
    parser.add_argument("--draws", type=int, default=3, help="for the intervals")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="processes")
    parser.add_argument("--kept", type=Path, default=KEPT, help="where runs are kept")
    parser.add_argument("--out", type=Path, default=None, help="the page; else it is printed")
    options = parser.parse_args(arguments)
    options.command = command("zoo", options, parser)
    if BASELINE not in options.policies:
        options.policies = [*options.policies, BASELINE]
    return options


def _draws(policy: str, trace: str, scenario: str, draws: int) -> list[Cell]:
    return [
        Cell(
            policy,
            trace,
            scenario,
            epochs=TRACES[trace],
            prompts_per_step=PROMPTS_PER_STEP.get(trace, 0),
            samples_per_prompt=GROUP_SIZES[trace],
            draw=draw,
        )
        for draw in range(draws + 1)
    ]


def _table_of(runs: Sequence[Sequence[Run]]) -> Table:
    """By policy, the baseline first; of each the run of the trace and those of its resamples."""
    of_trace, resamples = [drawn[:1] for drawn in runs], [drawn[1:] for drawn in runs]
    again = [drawn[0].summary.reprefilled_tokens / 1e6 for drawn in runs]
    return list(zip(compared(of_trace, resamples), again, strict=True))


#: All samples of a prompt in each epoch, as a trainer has them.
GROUP_SIZES = {
    "lrm_math_open": 5,
    "lrm_token_economy": 5,
    "composite_math_512x8": 8,
    "tau_airline": 4,
    "composite_tau_256x8": 8,
}


# -- the page ----------------------------------------------------------------------------------


def _document(
    tables: Mapping[tuple[str, str], Table], policies: Sequence[str], options: argparse.Namespace
) -> Iterator[str]:
    yield HEAD.format(
        command=options.command,
        interval=_interval(options.draws),
        epochs=", ".join(f"{trace} {TRACES[trace]} times" for trace in options.traces),
        baseline=BASELINE,
    )
    yield "## Summary\n"
    yield "Speed-up: the geometric mean over a scenario's traces, with the marks of all of them.\n"
    yield from _summary(tables, policies)
    for (scenario, trace), table in tables.items():
        yield f"\n## {trace} on {scenario}\n"
        yield from _lines(COLUMNS, [_cells(row, again) for row, again in table])
    yield "\n## What differs from the systems\n"
    for name in policies:
        policy = load_policy(name)
        if policy.differs:
            yield f"* **{name}** ({policy.source}). {policy.differs}"
    yield ""


def _interval(draws: int) -> str:
    if not draws:
        return "here without intervals, which `make zoo` adds"
    return (
        "and the brackets are the 95 % interval of `simulators/replay/comparison.py`, from\n"
        f"{draws} resamples of the trace's prompts; both policies are replayed anew on each"
    )


def _summary(tables: Mapping[tuple[str, str], Table], policies: Sequence[str]) -> Iterator[str]:
    scenarios = list(dict.fromkeys(scenario for scenario, _ in tables))
    lines = []
    for name in policies:
        line, stale = [name + marks(name)], []
        for scenario in scenarios:
            rows = [
                row
                for (where, _), table in tables.items()
                for row, _ in table
                if where == scenario and row.name == name
            ]
            marked = "".join(sorted({MARKS[row.bias] for row in rows}))
            speed = geometric_mean([row.speed_up.value for row in rows])
            line.append(f"{speed:.2f}x{marked}")
            stale += [row.staleness_mean for row in rows]
        lines.append([*line, f"{mean(stale):.2f}", load_policy(name).about])
    yield from _lines(("policy", *scenarios, "stale", "what it is"), lines)


def _cells(row: Compared, again: float) -> list[str]:
    return [
        row.name + marks(row.name) + MARKS[row.bias],
        shown(row.speed_up),
        f"{row.time.value:.2f}x",
        "-" if row.steady is None else f"{row.steady.value:.2f}x",
        f"{row.staleness_mean:.2f} ({row.staleness_max})",
        f"{row.mean_ratio.value:.3f}",
        "-" if row.steady_mean_ratio is None else f"{row.steady_mean_ratio:.2f}",
        f"{row.longest_tenth_kept.value:.2f}",
        f"{row.step_ks_excess:+.2f}",
        f"{row.discarded_share:.2f}",
        f"{again:.1f}",
    ]


def _lines(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for line in lines:
        yield "| " + " | ".join(line) + " |"


if __name__ == "__main__":
    main()
