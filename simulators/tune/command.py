"""The command `rollout-sched tune`: find the policy for a trace, a fleet and the user's limits."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rollout_sched.core.model.errors import CallerError
from rollout_sched.flags import natural, positive, seconds, share
from rollout_sched.process import whole_file
from rollout_sched.simulators.replay import load_scenario
from rollout_sched.simulators.traces.command import add_trace, read_trace
from rollout_sched.simulators.traces.model import TOKENS_PER_S
from rollout_sched.simulators.tune import evidence
from rollout_sched.simulators.tune.evaluation import HardLimits, WorkerPool, bench_of
from rollout_sched.simulators.tune.search import Plan, TuningResult, steps_for, tune

#: Default seconds of a search.
BUDGET_S = 120.0

#: Options that override the scenario's job.
_JOB = ("prompts_per_step", "epochs", "known_samples")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    add_trace(parser)
    option("--scenario", required=True, metavar="NAME_OR_TOML")
    option("--max-staleness", type=natural, required=True, metavar="K", help="versions per sample")
    option(
        "--max-length-bias",
        type=share,
        default=0.01,
        metavar="B",
        help="mean length trained within 1 - B and 1 + B of that offered, and at least 1 - 2 B of "
        "the longest tenth of the samples; default: %(default)s",
    )
    option(
        "--max-step-bias",
        type=share,
        default=0.1,
        metavar="C",
        help="how far a step's lengths may differ from all lengths, beyond chance "
        "(Kolmogorov-Smirnov, mean over the steps); default: %(default)s",
    )
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--budget", type=seconds, metavar="SECONDS", help=f"total time; default: {BUDGET_S:g}"
    )
    budget.add_argument(
        "--evaluations",
        type=positive,
        metavar="N",
        help="number of evaluations, without a time limit: the same number gives the same file",
    )
    option("--jobs", type=positive, metavar="N", help="processes; default: one per core")
    option("--out", type=Path, required=True, metavar="FILE", help="the policy file to write")
    option("--seed", type=natural, default=0, metavar="N", help="of all random choices")
    option(
        "--held-out-seeds",
        type=natural,
        default=Plan(0).held_out_seeds,
        metavar="N",
        help="seeds to validate on, 0 for no validation; default: %(default)s",
    )
    for key in _JOB:
        flag = f"--{key.replace('_', '-')}"
        option(flag, type=positive, default=0, metavar="N", help="override the scenario's job")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Tune, write the policy file, print the findings. Raises CallerError and the like."""
    _check_output(options.out)
    scenario = load_scenario(options.scenario).with_job(vars(options))
    bench = bench_of(read_trace(options), scenario, seed=options.seed)
    limits = HardLimits(options.max_staleness, options.max_length_bias, options.max_step_bias)
    plan = Plan(
        steps=steps_for(options.max_staleness),
        seconds=_budget_s(options),
        evaluations=options.evaluations,
        held_out_seeds=options.held_out_seeds,
        seed=options.seed,
    )
    jobs = options.jobs or os.cpu_count() or 1
    with WorkerPool(bench, jobs) as workers, _progress() as bar:
        task = bar.add_task("evaluations")
        result = tune(bench, limits, plan, workers, told=lambda: bar.advance(task))
    text = evidence.document(result, bench, limits, plan, command_of(options, result))
    with whole_file(options.out) as file:
        file.write(text.encode())
    facts = [*evidence.facts(result, bench, limits, plan), f"the search ended: {result.ended}"]
    _print(result, limits, [*facts, *evidence.against(result)])
    print(f"{options.out}: {result.winner.name}")


def command_of(options: argparse.Namespace, result: TuningResult) -> str:
    """The command that reproduces the file on any machine."""
    seeds = len(result.finalists.cases) if result.finalists.held_out else 0
    words = [
        *("rollout-sched", "tune", options.trace, "--scenario", options.scenario),
        *("--max-staleness", options.max_staleness),
        *("--max-length-bias", f"{options.max_length_bias:g}"),
        *("--max-step-bias", f"{options.max_step_bias:g}"),
        *("--evaluations", result.evaluations, "--held-out-seeds", seeds),
        *("--seed", options.seed),
        *_job_words(options),
        *_counting_words(options),
        *("--out", options.out.name),
    ]
    return shlex.join(map(str, words))


def _counting_words(options: argparse.Namespace) -> list[str]:
    words = [] if options.tokenizer is None else ["--tokenizer", str(options.tokenizer)]
    if options.tokens_per_s != TOKENS_PER_S:
        words += ["--tokens-per-s", f"{options.tokens_per_s:g}"]
    return words


def _job_words(options: argparse.Namespace) -> list[str]:
    given = [key for key in _JOB if getattr(options, key)]
    return [w for k in given for w in (f"--{k.replace('_', '-')}", str(getattr(options, k)))]


def _budget_s(options: argparse.Namespace) -> float | None:
    if options.evaluations is not None:
        return None
    return BUDGET_S if options.budget is None else float(options.budget)


def _check_output(path: Path) -> None:
    """Check before the search, not after it."""
    if path.is_dir():
        raise CallerError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise CallerError(f"{path}: folder {path.parent} does not exist; create it first")


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.completed} {task.description}; Ctrl-C keeps the best so far"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _print(result: TuningResult, limits: HardLimits, lines: list[str]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 160))
    for line in lines:
        console.print(line, highlight=False, markup=False)
    for table in evidence.tables(result, limits):
        console.print(table)
