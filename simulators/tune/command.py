"""The command `rollout-sched tune`: find the policy for a trace, a fleet and the user's limits."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rollout_sched.flags import Flag, add_flags, given_flags
from rollout_sched.process import check_writable, whole_file
from rollout_sched.simulators.replay import Job, load_scenario
from rollout_sched.simulators.traces.command import add_trace, read_trace
from rollout_sched.simulators.traces.model import TOKENS_PER_S
from rollout_sched.simulators.tune import evidence
from rollout_sched.simulators.tune.evaluation import HardLimits, bench_of
from rollout_sched.simulators.tune.search import Plan, TuningResult, steps_for, tune
from rollout_sched.workers import WorkerPool

#: Default seconds of a search.
BUDGET_S = 120.0

#: The fields of a job that have a flag.
_JOB = ("prompts_per_step", "epochs", "known_samples")


class TuneOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is tuned, and where the result goes.

    scenario  the fleet and the job
    out       the policy file to write
    jobs      processes (default: one per core)
    """

    scenario: Annotated[str, Flag(metavar="NAME_OR_TOML")]
    out: Annotated[Path, Flag(metavar="FILE")]
    jobs: Annotated[int, msgspec.Meta(ge=1)] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace(parser)
    add_flags(parser, TuneOptions)
    add_flags(parser, HardLimits)
    add_flags(parser.add_mutually_exclusive_group(), Plan, ["seconds", "evaluations"])
    add_flags(parser, Plan, ["held_out_seeds", "seed"])
    add_flags(parser.add_argument_group("job", "in place of the scenario's"), Job, _JOB)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Tune, write the policy file, print the findings. Raises CallerError and the like."""
    options = TuneOptions(**given_flags(given, TuneOptions))
    limits = HardLimits(**given_flags(given, HardLimits))
    plan = Plan(steps_for(limits.max_staleness), **given_flags(given, Plan))
    if plan.evaluations is None and plan.seconds is None:
        plan = msgspec.structs.replace(plan, seconds=BUDGET_S)
    check_writable(options.out)
    scenario = load_scenario(options.scenario).with_job(given_flags(given, Job))
    bench = bench_of(read_trace(given), scenario, seed=plan.seed)
    jobs = options.jobs or os.cpu_count() or 1
    with WorkerPool(bench, jobs) as workers, _progress() as bar:
        task = bar.add_task("evaluations")
        result = tune(bench, limits, plan, workers, told=lambda: bar.advance(task))
    text = evidence.document(result, bench, limits, plan, command_of(given, result))
    with whole_file(options.out) as file:
        file.write(text.encode())
    print(*evidence.report(result, bench, limits, plan), sep="\n")
    print(f"\nthe search ended: {result.ended}\n{options.out}: {result.winner.name}")


def command_of(given: argparse.Namespace, result: TuningResult) -> str:
    """The command that reproduces the file on any machine."""
    options = TuneOptions(**given_flags(given, TuneOptions))
    limits = HardLimits(**given_flags(given, HardLimits))
    seeds = len(result.finalists.cases) if result.finalists.held_out else 0
    words = [
        *("rollout-sched", "tune", given.trace, "--scenario", options.scenario),
        *("--max-staleness", limits.max_staleness),
        *("--max-length-bias", f"{limits.max_length_bias:g}"),
        *("--max-step-bias", f"{limits.max_step_bias:g}"),
        *("--evaluations", result.evaluations, "--held-out-seeds", seeds),
        *("--seed", given_flags(given, Plan).get("seed", 0)),
    ]
    for key, value in given_flags(given, Job).items():
        words += [f"--{key.replace('_', '-')}", value]
    if given.tokenizer is not None:
        words += ["--tokenizer", given.tokenizer]
    if given.tokens_per_s != TOKENS_PER_S:
        words += ["--tokens-per-s", f"{given.tokens_per_s:g}"]
    return shlex.join(map(str, [*words, "--out", options.out.name]))


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.completed} {task.description}; Ctrl-C keeps the best so far"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
