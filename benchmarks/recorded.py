"""What the trace of a recorded run says of other policies: `python -m benchmarks.recorded`.

A replay stands for the run, because its truth is known: it is recorded under each preset, and its
trace is replayed under `round_robin_sync` and `best_on_policy`. "Delivered" is the trace of what
the trainer got, in the order in which it got it; "submitted" is that of `journal trace`. A
restarted request does not get the same length again, as in a real run, but with `--no-redraws`.

A second table is of lengths drawn at random: mean and p99 of those asked for, with the cut ones
completed, over the true ones: the mean over several traces and, in brackets, the least and the
greatest. Output is Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.lab import lab_trace
from rollout_sched.config import PolicyFile, load_policy, parse_policy, shipped
from rollout_sched.core.model.actions import Action, Deliver
from rollout_sched.core.model.events import Event
from rollout_sched.inspection import recorded_trace
from rollout_sched.inspection.recording import Recording
from rollout_sched.simulators.replay import Scenario, load_scenario
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.replay.scenario import Job
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces import SampleRecord, Trace, Turn, gather, read
from rollout_sched.simulators.traces.lengths import LengthModel

BASE, OTHER = "round_robin_sync", "best_on_policy"

#: Traces, and the prompts of a step.
TRACES = {"lrm_token_economy": 24, "composite_math_512x8": 32}


def _with_batching(name: str, **parameters: float) -> PolicyFile:
    tables = load_policy(name).tables
    return parse_policy(name, {**tables, "batching": {**tables["batching"], **parameters}})


class Figures(NamedTuple):
    """`step_s`: of `BASE`; `ratio`: its time over that of `OTHER`; tokens of a sample."""

    step_s: float
    ratio: float
    mean_tokens: float


class Case(NamedTuple):
    trace: str
    recorded_under: str
    steps: int
    redraws: bool = True


def scenario(trace: str, *, redraws: bool = True) -> Scenario:
    job = {"prompts_per_step": TRACES[trace], "redraws": redraws}
    return load_scenario("qwen7b-8xh100-disaggregated").with_job(job)


def workload(case: Case) -> Trace:
    return read(case.trace).head(case.steps * TRACES[case.trace])


def figures(trace: Trace, world: Scenario) -> Figures:
    base, other = (run_policy(load_policy(name), trace, world).summary for name in (BASE, OTHER))
    offered = [one.response_tokens for one in Workload(trace, world.job).offered_samples()]
    return Figures(
        base.total_s / base.steps, base.total_s / other.total_s, sum(offered) / len(offered)
    )


def delivered_trace(recording: Recording) -> Trace:
    samples: list[SampleRecord] = []

    def take(now: float, event: Event, actions: Iterable[Action]) -> None:
        samples.extend(
            SampleRecord(made.group, made.index, made.prompt_tokens, (Turn(made.response_tokens),))
            for action in actions
            if isinstance(action, Deliver)
            for made in action.samples
        )

    recording.tell([take])
    return Trace("delivered", gather(samples))


def measured(case: Case) -> tuple[Figures, Figures]:
    """From the trace of what was delivered, and of what was submitted."""
    world = scenario(case.trace, redraws=case.redraws)
    with TemporaryDirectory() as folder:
        path = Path(folder, "journal.jsonl")
        run_policy(load_policy(case.recorded_under), workload(case), world, journal_path=path)
        recording = Recording(path)
        submitted, _ = recorded_trace("submitted", [recording])
        return figures(delivered_trace(recording), world), figures(submitted, world)


def truth(case: Case) -> tuple[Figures, Figures]:
    found = figures(workload(case), scenario(case.trace))
    return found, found


#: Of lengths whose distribution is known; names of the lab.
SHAPES = ("heavy", "independent", "pareto", "runaways")
BATCHINGS = {
    "`best_on_policy`": load_policy("best_on_policy"),
    "`stage_fusion`": load_policy("stage_fusion"),
    "`best_on_policy batching.over_prompts=1.5`": _with_batching(
        "best_on_policy", over_prompts=1.5
    ),
    "`tail_batching`": load_policy("tail_batching"),
    "over-sampling by 1.5": _with_batching("tail_batching", over_prompts=1.0, over_samples=1.5),
}
PROMPTS, SAMPLES, COMPLETIONS = 192, 8, 4


def completed(shape: str, policy: PolicyFile, seed: int) -> tuple[float, float]:
    """Mean and p99 over the true ones, of 8 samples asked for and 4 that a policy may add."""
    drawn = lab_trace(np.random.default_rng(seed), shape, PROMPTS, SAMPLES * 3 // 2)
    truth = msgspec.structs.replace(drawn, samples_per_prompt=SAMPLES)
    with TemporaryDirectory() as folder:
        path = Path(folder, "journal.jsonl")
        run_policy(policy, truth, scenario("composite_math_512x8"), journal_path=path)
        found, _ = recorded_trace("found", [Recording(path)])
    model = LengthModel(found)
    loads = [Workload(found, Job(), seed=each, lengths=model) for each in range(COMPLETIONS)]
    lengths = np.array([[one.response_tokens for one in load.offered_samples()] for load in loads])
    true = [one.response_tokens for one in Workload(truth, Job()).offered_samples()]
    p99 = np.quantile(lengths, 0.99, axis=1).mean() / np.quantile(true, 0.99)
    return float(lengths.mean() / np.mean(true)), float(p99)


def cell(shape: str, policy: PolicyFile, traces: int) -> str:
    found = np.array([completed(shape, policy, seed) for seed in range(traces)])
    figures = zip(found.mean(axis=0), found.min(axis=0), found.max(axis=0), strict=True)
    return ", ".join(f"{mean:.2f} ({least:.2f}-{most:.2f})" for mean, least, most in figures)


def shown(case: Case, what: str, found: tuple[Figures, Figures]) -> str:
    pairs = zip(*found, strict=True)
    forms = (".1f", ".2f", ",.0f")
    cells = [format(value, form) for pair, form in zip(pairs, forms, strict=True) for value in pair]
    return f"| {' | '.join([case.trace, what, *cells])} |"


def runs(policies: Iterable[str], steps: int, *, redraws: bool) -> None:
    columns = ["trace", "recorded under"]
    for figure in (f"s/step of {BASE}", f"{OTHER} over it", "mean length"):
        columns += [f"{figure}: delivered", "submitted"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for trace in TRACES:
        print(shown(case := Case(trace, BASE, steps), "(truth)", truth(case)))
        for policy in policies:
            case = Case(trace, policy, steps, redraws)
            print(shown(case, policy, measured(case)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--policies", nargs="+", default=shipped("policies/presets"))
    parser.add_argument("--redraws", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--traces", type=int, default=6, help="of the second table")
    parser.add_argument("--lengths", action="store_true", help="only the second table")
    parser.add_argument("--runs", action="store_true", help="only the first table")
    options = parser.parse_args()
    if not options.lengths:
        runs(options.policies, options.steps, redraws=options.redraws)
    if options.runs:
        return
    print(f"\n| recorded under | {' | '.join(SHAPES)} |\n|{'---|' * (1 + len(SHAPES))}")
    for name, policy in BATCHINGS.items():
        row = [cell(shape, policy, options.traces) for shape in SHAPES]
        print(f"| {name} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
