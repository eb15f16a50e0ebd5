"""Every preset on every shipped grouped trace in every plain scenario: `make zoo`.

What was run is kept in build/runs until the sources change, so a run that was interrupted goes on.
`python -m benchmarks.zoo --traces ... --scenarios ... --policies ...` takes a part of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

import msgspec

from benchmarks.cells import Cell, default_jobs, run_all
from benchmarks.ratios import Ratio, ratio
from rollout_sched.config import load_policy, shipped
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

    make zoo

writes this page: every shipped policy on every shipped grouped trace in the plain scenarios, {runs} runs
of {draws} draw(s) each.

**Protocol.** All policies train the same prompts to the end of the run, deferred ones included: {epochs}.
Nobody else uses the fleet. Draw 0 is the trace as recorded; the others are as many of its prompts drawn
with replacement (a bootstrap over prompts, each draw replayed anew), and the brackets are the lowest and
the highest ratio of the draws, each against `{baseline}` on the same draw. Later epochs train samples that
were drawn from the same recorded ones, so a policy that remembers prompts has seen the like of them:
`rhyme` is flattered here, and says so with `*`.

* **speed-up**: trained tokens a second, counted as no more than was offered, over the baseline's; so who
  trains shorter samples does not gain by it. **time**: the same of the whole run's seconds.
* **staleness**: mean and most over the samples, in trainer steps.
* **trained**: mean length trained over offered; **tenth kept**: of the longest tenth; **step KS**: how far a
  step's lengths are from all, less what chance makes of it (above 0.05 or so the policy trains by length).
* **discarded**: tokens thrown away for one that was trained; **prefilled again**: tokens whose KV had been
  there before, in millions.

A policy with `!` trained less than 0.99 of the offered length or kept less than 0.98 of the longest tenth:
its speed is bought with length.
"""


class Row(msgspec.Struct):
    """One policy on one trace in one scenario, over the draws."""

    policy: str
    speed: Ratio
    time: Ratio
    runs: list[Run]

    @property
    def short(self) -> bool:
        """Whether it trains shorter samples than it was asked for."""
        return self.mean("mean_ratio") < 0.99 or self.mean("longest_tenth_kept") < 0.98

    def mean(self, of_bias: str) -> float:
        return _mean([getattr(run.summary.length_bias, of_bias) for run in self.runs])

    @property
    def cells(self) -> list[str]:
        summaries = [run.summary for run in self.runs]
        stale = _mean([s.staleness_mean for s in summaries])
        most = max(s.staleness_max for s in summaries)
        trained = [s.accepted_tokens_per_s * s.total_s for s in summaries]
        wasted = [s.discarded_tokens / tokens for s, tokens in zip(summaries, trained, strict=True)]
        again = _mean([s.reprefilled_tokens / 1e6 for s in summaries])
        return [
            self.policy + marks(self.policy) + ("!" if self.short else ""),
            self.speed.text,
            f"{self.time.mean:.2f}x",
            f"{stale:.2f} ({most})",
            f"{self.mean('mean_ratio'):.3f}",
            f"{self.mean('longest_tenth_kept'):.2f}",
            f"{self.mean('step_ks_excess'):+.2f}",
            f"{_mean(wasted):.2f}",
            f"{again:.1f}",
        ]


COLUMNS = (
    "policy",
    "speed-up",
    "time",
    "staleness",
    "trained",
    "tenth kept",
    "step KS",
    "discarded",
    "prefilled again",
)


def marks(policy: str) -> str:
    """`*` for who remembers prompts."""
    roles = load_policy(policy).roles.values()
    return "*" if any(getattr(cls, "uses_history", False) for cls, _ in roles) else ""


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
    tables: dict[tuple[str, str], list[Row]] = {}
    for (scenario, trace, policy), drawn in cells.items():
        baseline = [runs[cell] for cell in cells[scenario, trace, BASELINE]]
        own = [runs[cell] for cell in drawn]
        row = Row(policy, ratio(baseline, own, "tokens"), ratio(baseline, own, "total"), own)
        tables.setdefault((scenario, trace), []).append(row)
    text = "\n".join(_document(tables, policies, len(cells), options.draws))
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
    parser.add_argument("--draws", type=int, default=2, help="of each trace")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="processes")
    parser.add_argument("--kept", type=Path, default=KEPT, help="where runs are kept")
    parser.add_argument("--out", type=Path, default=None, help="the page; else it is printed")
    options = parser.parse_args(arguments)
    if BASELINE not in options.policies:
        options.policies.append(BASELINE)
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
        for draw in range(draws)
    ]


#: All samples of a prompt in each epoch, as a trainer has them.
GROUP_SIZES = {
    "lrm_math_open": 5,
    "lrm_token_economy": 5,
    "composite_math_512x8": 8,
    "tau_airline": 4,
    "composite_tau_256x8": 8,
}


# -- the document ------------------------------------------------------------------------------


def _document(
    tables: Mapping[tuple[str, str], Sequence[Row]],
    policies: Sequence[str],
    runs: int,
    draws: int,
) -> Iterator[str]:
    epochs = ", ".join(f"{trace} {times} times" for trace, times in TRACES.items())
    yield HEAD.format(runs=runs, draws=draws, epochs=epochs, baseline=BASELINE)
    yield "## In short\n"
    yield "Speed-up, the geometric mean over the traces of a scenario; `!` where any is marked so.\n"
    yield from _summary(tables, policies)
    for scenario, trace in tables:
        yield f"\n## {trace} on {scenario}\n"
        yield from _table(COLUMNS, [row.cells for row in tables[scenario, trace]])
    yield "\n## What differs from the systems\n"
    for name in policies:
        policy = load_policy(name)
        if policy.differs:
            yield f"* **{name}** ({policy.source}). {policy.differs}"
    yield ""


def _summary(
    tables: Mapping[tuple[str, str], Sequence[Row]], policies: Sequence[str]
) -> Iterator[str]:
    scenarios = list(dict.fromkeys(scenario for scenario, _ in tables))
    lines = []
    for name in policies:
        line = [name + marks(name)]
        stale: list[float] = []
        for scenario in scenarios:
            rows = [
                row
                for (where, _), table in tables.items()
                for row in table
                if where == scenario and row.policy == name
            ]
            mark = "!" if any(row.short for row in rows) else ""
            line.append(f"{geometric_mean([row.speed.mean for row in rows]):.2f}x{mark}")
            stale += [run.summary.staleness_mean for row in rows for run in row.runs]
        lines.append([*line, f"{_mean(stale):.2f}", load_policy(name).about])
    yield from _table(("policy", *scenarios, "staleness", "what it is"), lines)


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for line in lines:
        yield "| " + " | ".join(line) + " |"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
