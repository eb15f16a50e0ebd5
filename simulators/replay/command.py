"""The command `rollout-sched replay`: compare policies on a recorded workload."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rollout_sched import config
from rollout_sched.argument_types import natural, positive
from rollout_sched.config import PolicyFile
from rollout_sched.core.errors import CallerError
from rollout_sched.live.live_scheduler import settings_of
from rollout_sched.simulators import traces
from rollout_sched.simulators.replay import report as reports
from rollout_sched.simulators.replay.report_tables import footnote, heading, tables, wrapped
from rollout_sched.simulators.replay.run_notes import Progress as Deliveries
from rollout_sched.simulators.replay.runs import Interrupted, Run, replay, replay_resampled
from rollout_sched.simulators.replay.scenario import Scenario, load_scenario
from rollout_sched.simulators.replay.verdict import verdict
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import Trace
from rollout_sched.whole_file import whole_file

BASELINES = ("static_split", "round_robin_sync")
DEFAULT_SCENARIO = "qwen7b-8xh100-disaggregated"

#: Columns, where the output is no terminal.
WIDTH = 100

#: How the report is written to a file, by the option that names it.
WRITERS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "json": reports.as_json,
    "csv": reports.as_csv,
}


def add(commands: Any) -> None:
    """The command and its options, for an argparse parser of commands."""
    parser = commands.add_parser("replay", help="compare policies on a recorded workload")
    add = parser.add_argument
    add("trace", metavar="TRACE", help="a trace file, or the name of a shipped trace")
    add(
        "--policy",
        action="append",
        metavar="NAME_OR_TOML",
        help="a preset or a file; repeat to compare (default: all presets)",
    )
    add("--baseline", metavar="NAME", help="ratios are to this policy; default: the first")
    add("--scenario", default=DEFAULT_SCENARIO, metavar="NAME_OR_TOML", help="default: %(default)s")
    add("--steps", type=positive, default=0, metavar="N", help="only the first N steps' prompts")
    add("--seeds", type=positive, default=1, metavar="K", help="runs per policy, in other orders")
    add(
        "--resamples",
        type=natural,
        default=0,
        metavar="N",
        help="further runs of each policy on resampled prompts, for intervals; 12 will do",
    )
    add("--jobs", type=positive, default=1, metavar="N", help="runs at once")
    add("--equal-bias", action="store_true", help="no ratios of whose samples are of other lengths")
    add("--max-staleness", type=natural, metavar="K", help="that the verdict may choose from")
    _add_job(parser)
    for name in WRITERS:
        add(f"--{name}", metavar="FILE", help="write every figure to FILE, - for standard output")
    add("--journal", type=Path, metavar="FILE", help="write every event to FILE")
    parser.set_defaults(run=run)


def _add_job(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts-per-step", type=positive, default=0, metavar="N")
    add("--samples-per-prompt", type=positive, default=0, metavar="N")
    add("--epochs", type=positive, default=0, metavar="N", help="each trains other samples")
    add(
        "--known-samples",
        type=natural,
        default=0,
        metavar="N",
        help="of each prompt; they are not trained, but their lengths known from before the run",
    )
    add("--redraws", action="store_true", help="what starts over is drawn anew from its prompt's")
    add("--max-tokens", type=positive, default=0, metavar="N", help="cap of a response")


def run(options: argparse.Namespace) -> None:
    """Raises RolloutError, TraceError or OSError before any work for what cannot be used; Ctrl-C
    reports the policies that are done, and is raised again."""
    policies = _policies(options)
    scenario = load_scenario(options.scenario).with_job(vars(options))
    _check_files(options)
    trace = traces.read(options.trace)
    workload = Workload(trace, scenario.job, steps=options.steps, traffic=scenario.traffic)
    workload.check_fits(scenario)
    for policy in policies:
        policy.build(lengths=workload.length)  # an error comes now or never
        settings_of(policy)
    try:
        runs, resamples = _run(options, trace, policies, scenario, len(workload.groups))
    except Interrupted as interrupted:
        if interrupted.runs:
            _report(options, trace, scenario, interrupted.runs, ())
        names = " ".join(f"--policy {policy.name}" for policy in policies[len(interrupted.runs) :])
        print(f"interrupted; what is missing: {names}", file=sys.stderr)
        raise KeyboardInterrupt from interrupted
    _report(options, trace, scenario, runs, resamples)


def _policies(options: argparse.Namespace) -> list[PolicyFile]:
    names = options.policy or _baseline_first(config.shipped("policies/presets"))
    policies = [config.load_policy(name) for name in names]
    found = [policy.name for policy in policies]
    for name in found:
        # Figures and journals are told apart by the policy's name, a file's stem.
        if found.count(name) > 1:
            raise CallerError(f"--policy: {name} is there twice; give each policy its own name")
    if options.baseline is None:
        return policies
    baseline = config.load_policy(options.baseline)
    return [baseline, *(policy for policy in policies if policy.name != baseline.name)]


def _baseline_first(names: Sequence[str]) -> list[str]:
    first = [name for name in BASELINES if name in names]
    return [*first, *(name for name in names if name not in first)]


def _check_files(options: argparse.Namespace) -> None:
    named = [getattr(options, name) for name in WRITERS]
    if named.count("-") > 1:
        raise CallerError("only one of " + ", ".join(f"--{name}" for name in WRITERS) + " can be -")
    for file in (*named, options.journal):
        if file is None or file == "-":
            continue
        path = Path(file)
        if not path.parent.is_dir():
            raise CallerError(f"{path}: there is no folder {path.parent}; create it first")
        if path.is_dir():
            raise CallerError(f"{path} is a folder; name a file in it")


def _run(
    options: argparse.Namespace,
    trace: Trace,
    policies: Sequence[PolicyFile],
    scenario: Scenario,
    groups: int,
) -> tuple[list[list[Run]], list[list[Run]]]:
    with _progress() as bar:

        def follow(policy: str, seed: int, what: str = "seed") -> Deliveries:
            task = bar.add_task(f"{policy}, {what} {seed}", total=groups)
            return lambda groups: bar.advance(task, groups)

        runs = replay(
            trace,
            policies,
            scenario,
            steps=options.steps,
            seeds=options.seeds,
            jobs=options.jobs,
            progress=follow,
            journal_path=options.journal,
        )
        try:
            resamples = replay_resampled(
                trace,
                policies,
                scenario,
                steps=options.steps,
                resamples=options.resamples,
                jobs=options.jobs,
                progress=lambda policy, number: follow(policy, number, "resample"),
            )
        except Interrupted as interrupted:
            raise Interrupted(runs) from interrupted
    return runs, resamples


def _report(
    options: argparse.Namespace,
    trace: Trace,
    scenario: Scenario,
    runs: Sequence[Sequence[Run]],
    resamples: Sequence[Sequence[Run]],
) -> None:
    report = reports.document(
        trace,
        scenario,
        runs,
        steps=options.steps,
        seeds=options.seeds,
        resamples=resamples,
    )
    report["verdict"] = verdict(report, options.max_staleness)
    to_stdout = False
    for name, write in WRITERS.items():
        file = getattr(options, name)
        if file == "-":
            to_stdout = True
            sys.stdout.write(write(report).decode())
        elif file is not None:
            with whole_file(Path(file)) as opened:
                opened.write(write(report))
    if not to_stdout:
        print(shown(report, _width(), equal_bias=options.equal_bias))


def shown(report: dict[str, Any], width: int, *, equal_bias: bool = False) -> str:
    """The report to read, in lines of at most `width` characters."""
    parts = [
        heading(report, width),
        tables(report, width, equal_bias=equal_bias),
        footnote(report, width),
        "\n".join(line for text in report["verdict"] for line in wrapped(text, width)),
    ]
    return "\n\n".join(part for part in parts if part)


def _width() -> int:
    """That of the terminal; one that suits a file where there is none."""
    console = Console()
    return console.width if console.is_terminal else WIDTH


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} groups"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
