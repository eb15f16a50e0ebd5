"""The command `rollout-sched replay`, which compares policies on a recorded workload."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rollout_sched import config
from rollout_sched.config import PolicyFile
from rollout_sched.core.model.errors import CallerError
from rollout_sched.flags import natural, positive
from rollout_sched.live import settings_of
from rollout_sched.live.trainer import reward_settings_of
from rollout_sched.process import whole_file
from rollout_sched.simulators.replay import report as reports
from rollout_sched.simulators.replay.closed_loop import Progress as Deliveries
from rollout_sched.simulators.replay.comparison import verdict
from rollout_sched.simulators.replay.report import footnote, heading, report_page, tables, wrapped
from rollout_sched.simulators.replay.runs import (
    Interrupted,
    Run,
    call_each,
    replay,
    replay_resampled,
)
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.sweep import (
    Axis,
    World,
    axis,
    is_of_policies,
    split,
    sweep_page,
    table,
    worlds,
)
from rollout_sched.simulators.replay.sweep import document as sweep_document
from rollout_sched.simulators.replay.sweep import policies as policies_at
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.command import add_trace, read_trace
from rollout_sched.simulators.traces.model import Trace

BASELINES = ("static_split", "round_robin_sync")
DEFAULT_SCENARIO = "qwen7b-8xh100-disaggregated"

#: The line width if the output is not a terminal.
WIDTH = 100

#: The formats of the report, and the help of the option that names the file.
FORMATS = {
    "json": "write every figure to FILE; - is standard output",
    "csv": "the same, one row per policy",
    "html": "write a page with charts for a browser to FILE",
}

Write = Callable[[dict[str, Any]], bytes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_trace(parser)
    add(
        "--policy",
        action="append",
        metavar="NAME_OR_TOML",
        help="a preset or a file; repeat to compare (default: all presets)",
    )
    add("--baseline", metavar="NAME", help="policy that ratios refer to; default: the first")
    add(
        "--scenario",
        action="append",
        metavar="NAME_OR_TOML",
        help=f"repeatable; default: {DEFAULT_SCENARIO}",
    )
    _add_runs(parser)
    add(
        "--equal-bias",
        action="store_true",
        help="show no ratios of policies whose samples do not have the requested lengths",
    )
    add(
        "--max-staleness",
        type=natural,
        metavar="K",
        help="the verdict considers only policies whose samples are at most K versions old",
    )
    _add_job(parser)
    for name, says in FORMATS.items():
        add(f"--{name}", metavar="FILE", help=says)
    add("--journal", type=Path, metavar="FILE", help="write every event to FILE")
    parser.set_defaults(run=run)


def _add_runs(parser: argparse.ArgumentParser) -> None:
    """Which runs are made: the values to combine, how much of the trace, how often."""
    add = parser.add_argument
    add(
        "--set",
        type=_axis,
        action="append",
        dest="axes",
        metavar="TABLE.KEY=V,V",
        help="values of a policy or scenario parameter; all combinations are replayed",
    )
    add(
        "--split",
        type=positive,
        default=0,
        metavar="GPUS",
        help="try each way to split GPUS between fleet and trainer",
    )
    add(
        "--steps",
        type=positive,
        default=0,
        metavar="N",
        help="replay only the prompts of the first N steps",
    )
    add(
        "--seeds",
        type=positive,
        default=1,
        metavar="K",
        help="runs per policy, each with another order of prompts",
    )
    add(
        "--resamples",
        type=natural,
        default=0,
        metavar="N",
        help="extra runs of each policy on resampled prompts, for intervals; 12 are enough",
    )
    add("--jobs", type=positive, default=1, metavar="N", help="parallel runs")


def _axis(text: str) -> Axis:
    try:
        return axis(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_job(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts-per-step", type=positive, default=0, metavar="N")
    add("--samples-per-prompt", type=positive, default=0, metavar="N")
    add(
        "--epochs",
        type=positive,
        default=0,
        metavar="N",
        help="passes through the prompts, each with other samples",
    )
    add(
        "--known-samples",
        type=natural,
        default=0,
        metavar="N",
        help="N samples of each prompt are not trained; their lengths are known before the run",
    )
    add(
        "--redraws",
        action="store_true",
        help="a restarted request takes another recorded sample of its prompt",
    )
    add("--max-tokens", type=positive, default=0, metavar="N", help="maximum length of a response")


def run(options: argparse.Namespace) -> None:
    """Run the command.

    Raises RolloutError, TraceError or OSError before any work if an input cannot be used. On Ctrl-C
    it reports the finished runs and raises KeyboardInterrupt.
    """
    axes = options.axes or []
    policies = _policies(options, [one for one in axes if is_of_policies(one)])
    worlds = _worlds(options, [one for one in axes if not is_of_policies(one)])
    _check_files(options, several=len(worlds) > 1)
    trace = read_trace(options)
    for world in worlds:
        _check(options, trace, policies, world.scenario)
    if len(worlds) == 1:
        _replay(options, trace, policies, worlds[0].scenario)
    else:
        _sweep(options, trace, policies, worlds)


def _replay(
    options: argparse.Namespace, trace: Trace, policies: Sequence[PolicyFile], scenario: Scenario
) -> None:
    def write(runs: Sequence[Sequence[Run]], resamples: Sequence[Sequence[Run]]) -> None:
        load = Workload(trace, scenario.job, steps=options.steps)
        writers: dict[str, Write] = {
            "json": reports.as_json,
            "csv": reports.as_csv,
            "html": lambda report: report_page(report, runs, load),
        }
        _write(options, _report(options, trace, scenario, runs, resamples), shown, writers)

    try:
        runs, resamples = _run(options, trace, policies, scenario, records=bool(options.html))
    except Interrupted as interrupted:
        if interrupted.runs:
            write(interrupted.runs, ())
        names = " ".join(f"--policy {policy.name}" for policy in policies[len(interrupted.runs) :])
        print(f"interrupted; not finished: {names}", file=sys.stderr)
        raise KeyboardInterrupt from interrupted
    write(runs, resamples)


def _sweep(
    options: argparse.Namespace,
    trace: Trace,
    policies: Sequence[PolicyFile],
    worlds: Sequence[World],
) -> None:
    found: dict[int, dict[str, Any]] = {}
    try:
        _report_each(options, trace, policies, worlds, found)
    except (Interrupted, KeyboardInterrupt) as interrupted:
        missing = [world.said for number, world in enumerate(worlds) if number not in found]
        print(f"interrupted; not finished: {', '.join(missing)}", file=sys.stderr)
        raise KeyboardInterrupt from interrupted
    finally:
        if found:
            writers: dict[str, Write] = {"json": reports.as_json, "html": sweep_page}
            whole = sorted(found)
            document = sweep_document([found[n] for n in whole], [worlds[n] for n in whole])
            _write(options, document, _shown_sweep, writers)


def _report_each(
    options: argparse.Namespace,
    trace: Trace,
    policies: Sequence[PolicyFile],
    worlds: Sequence[World],
    found: dict[int, dict[str, Any]],
) -> None:
    """Put each world's report into `found`. With `--jobs` N it runs N worlds in parallel; if there
    are fewer worlds than that, it runs one world at a time with N parallel runs."""
    if not 1 < options.jobs <= len(worlds):
        for number, world in enumerate(worlds):
            runs, resamples = _run(options, trace, policies, world.scenario)
            found[number] = _report(options, trace, world.scenario, runs, resamples)
        return
    with _progress("worlds") as bar:
        task = bar.add_task("sweep", total=len(worlds))

        def done(number: int, report: dict[str, Any]) -> None:
            found[number] = report
            bar.advance(task)

        alone = argparse.Namespace(**{**vars(options), "jobs": 1})
        each = [(world.scenario,) for world in worlds]
        call_each(_world_report, (alone, trace, policies), each, options.jobs, done)


def _world_report(
    options: argparse.Namespace, trace: Trace, policies: Sequence[PolicyFile], scenario: Scenario
) -> dict[str, Any]:
    """The report of one world, made in a process that shows no progress."""
    runs, resamples = _runs(options, trace, policies, scenario, None)
    return _report(options, trace, scenario, runs, resamples)


def _shown_sweep(sweep: dict[str, Any], width: int, *, equal_bias: bool) -> str:
    first = sweep["worlds"][0]
    text = f"{first['trace']}: {first['groups']} groups, {len(sweep['worlds'])} worlds"
    return f"{text}\n\n{table(sweep, width)}"


def _check(
    options: argparse.Namespace, trace: Trace, policies: Sequence[PolicyFile], scenario: Scenario
) -> None:
    workload = Workload(trace, scenario.job, steps=options.steps, traffic=scenario.traffic)
    workload.check_fits(scenario)
    for policy in policies:
        policy.build(lengths=workload.length)  # so that errors show before any run
        settings_of(policy)
        reward_settings_of(policy)


def _worlds(options: argparse.Namespace, axes: Sequence[Axis]) -> list[World]:
    """Each scenario at each point of the axes, with the job options applied."""
    several = len(options.scenario or ()) > 1
    found = []
    for name in options.scenario or [DEFAULT_SCENARIO]:
        for world in worlds(name, axes):
            scenario = world.scenario.with_job(vars(options))
            said = f"{scenario.name} {world.said}".strip() if several else world.said
            found.append(World(scenario, said))
    if options.split:
        found = [one for world in found for one in split(world, options.split)]
    return found


def _policies(options: argparse.Namespace, axes: Sequence[Axis]) -> list[PolicyFile]:
    names = options.policy or _baseline_first(config.shipped("policies/presets"))
    found = policies_at(names, axes) if axes else [config.load_policy(name) for name in names]
    known = [policy.name for policy in found]
    for name in known:
        # The policy's name (the file's stem) identifies its figures and journal.
        if known.count(name) > 1:
            raise CallerError(f"--policy: {name} is there twice; give each policy its own name")
    if options.baseline is None:
        return found
    baseline = config.load_policy(options.baseline)
    return [baseline, *(policy for policy in found if policy.name != baseline.name)]


def _baseline_first(names: Sequence[str]) -> list[str]:
    first = [name for name in BASELINES if name in names]
    return [*first, *(name for name in names if name not in first)]


def _check_files(options: argparse.Namespace, *, several: bool) -> None:
    if several and options.journal is not None:
        raise CallerError("--journal works with one scenario only; replay that one alone")
    if several and options.csv is not None:
        raise CallerError("--csv works with one scenario only; use --json for several")
    named = [getattr(options, name) for name in FORMATS]
    if named.count("-") > 1:
        raise CallerError("only one of " + ", ".join(f"--{name}" for name in FORMATS) + " can be -")
    for file in (*named, options.journal):
        if file is None or file == "-":
            continue
        path = Path(file)
        if not path.parent.is_dir():
            raise CallerError(f"{path}: folder {path.parent} does not exist; create it first")
        if path.is_dir():
            raise CallerError(f"{path} is a folder; name a file in it")


def _run(
    options: argparse.Namespace,
    trace: Trace,
    policies: Sequence[PolicyFile],
    scenario: Scenario,
    *,
    records: bool = False,
) -> tuple[list[list[Run]], list[list[Run]]]:
    groups = len(Workload(trace, scenario.job, steps=options.steps).groups)
    with _progress("groups") as bar:

        def follow(run: str) -> Deliveries:
            task = bar.add_task(run, total=groups)
            return lambda groups: bar.advance(task, groups)

        return _runs(options, trace, policies, scenario, follow, records=records)


def _runs(
    options: argparse.Namespace,
    trace: Trace,
    policies: Sequence[PolicyFile],
    scenario: Scenario,
    follow: Callable[[str], Deliveries] | None,
    *,
    records: bool = False,
) -> tuple[list[list[Run]], list[list[Run]]]:
    """The runs of the trace and of its resamples; `follow` reports the progress of each."""

    def progress(what: str) -> Callable[[str, int], Deliveries] | None:
        return follow and (lambda policy, number: follow(f"{policy}, {what} {number}"))

    runs = replay(
        trace,
        policies,
        scenario,
        steps=options.steps,
        seeds=options.seeds,
        jobs=options.jobs,
        progress=progress("seed"),
        journal_path=options.journal,
        records=records,
    )
    try:
        resamples = replay_resampled(
            trace,
            policies,
            scenario,
            steps=options.steps,
            resamples=options.resamples,
            jobs=options.jobs,
            progress=progress("resample"),
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
) -> dict[str, Any]:
    report = reports.document(
        trace,
        scenario,
        runs,
        steps=options.steps,
        seeds=options.seeds,
        resamples=resamples,
    )
    report["verdict"] = verdict(report, options.max_staleness)
    return report


def _write(
    options: argparse.Namespace,
    report: dict[str, Any],
    show: Callable[..., str],
    writers: Mapping[str, Write],
) -> None:
    """Write the named files, and print the text report unless one of them is standard output."""
    to_stdout = False
    for name, write in writers.items():
        file = getattr(options, name)
        if file == "-":
            to_stdout = True
            sys.stdout.write(write(report).decode())
        elif file is not None:
            with whole_file(Path(file)) as opened:
                opened.write(write(report))
    if not to_stdout:
        print(show(report, _width(), equal_bias=options.equal_bias))


def shown(report: dict[str, Any], width: int, *, equal_bias: bool = False) -> str:
    """The report as text, in lines of at most `width` characters."""
    parts = [
        heading(report, width),
        tables(report, width, equal_bias=equal_bias),
        footnote(report, width),
        "\n".join(line for text in report["verdict"] for line in wrapped(text, width)),
    ]
    return "\n\n".join(part for part in parts if part)


def _width() -> int:
    """The width of the terminal, or WIDTH if the output is not a terminal."""
    console = Console()
    return console.width if console.is_terminal else WIDTH


def _progress(of: str) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed}}/{{task.total}} {of}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
