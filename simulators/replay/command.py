"""The command `rollout-sched replay`, which compares policies on a recorded workload."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, NamedTuple

import msgspec
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rollout_sched import config, terminal
from rollout_sched.config import PolicyFile
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.records import MAX_SIZE, Count, Size
from rollout_sched.flags import Flag, add_flags, given_flags
from rollout_sched.live import settings_of
from rollout_sched.live.trainer import reward_settings_of
from rollout_sched.process import check_writable, whole_file
from rollout_sched.simulators.replay import report as reports
from rollout_sched.simulators.replay.closed_loop import Progress as Deliveries
from rollout_sched.simulators.replay.comparison import fastest, verdict
from rollout_sched.simulators.replay.report import report_page
from rollout_sched.simulators.replay.runs import (
    Interrupted,
    Run,
    replay,
    replay_resampled,
)
from rollout_sched.simulators.replay.scenario import Job, Scenario
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
from rollout_sched.simulators.replay.tables import answer, bounds, heading, tables, wrapped
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.command import add_trace, read_trace
from rollout_sched.simulators.traces.model import Trace
from rollout_sched.workers import Jobs, WorkerPool

BASELINES = ("static_split", "round_robin_sync")
DEFAULT_SCENARIO = "qwen7b-8xh100-disaggregated"

#: The formats of the report, each with an option that names its file.
FORMATS = ("json", "html")

Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]
File = Annotated[str | None, Flag(metavar="FILE")]


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs are made, and what is shown of them.

    policies       a preset or a file; repeat to compare (default: all presets). That of a journal
                   is always there
    allow_code     import classes of your own that a policy names
    baseline       policy that ratios refer to (default: the first)
    scenarios      repeatable (default: qwen7b-8xh100-disaggregated, or that of the journal)
    axes           values of a policy or scenario parameter; all combinations are replayed
    split          try each way to split GPUS between fleet and trainer
    steps          replay only the prompts of the first N steps; 0: all
    seeds          runs per policy, each with another order of prompts
    resamples      extra runs of each policy on resampled prompts, for intervals; 12 are enough
    jobs           parallel runs
    max_staleness  the verdict considers only policies whose samples are at most K versions old
    full           print all figures, not only those of the answer
    json           write every figure to FILE; - is standard output
    html           write a page with charts for a browser to FILE
    journal        write every event to FILE
    """

    policies: Annotated[list[str], Flag("--policy", "NAME_OR_TOML")] = []
    allow_code: bool = False
    baseline: str | None = None
    scenarios: Annotated[list[str], Flag("--scenario", "NAME_OR_TOML")] = []
    axes: Annotated[list[str], Flag("--set", "TABLE.KEY=V,V")] = []
    split: Annotated[Positive | None, Flag(metavar="GPUS")] = None
    steps: Count = 0
    seeds: Positive = 1
    resamples: Size = 0
    jobs: Jobs = 1
    max_staleness: Annotated[Count | None, Flag(metavar="K")] = None
    full: bool = False
    json: File = None
    html: File = None
    journal: Annotated[Path | None, Flag(metavar="FILE")] = None


#: The fields of a job that have a flag.
JOB = (
    "prompts_per_step",
    "samples_per_prompt",
    "epochs",
    "known_samples",
    "redraws",
    "max_tokens",
)

#: Follows the name of a policy in front of a trainer that submits no groups.
IN_ROUNDS = " in rounds"

Write = Callable[[dict[str, Any]], bytes]
Runs = list[list[Run]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace(parser)
    add_flags(parser, ReplayOptions)
    add_flags(parser.add_argument_group("job", "in place of the scenario's"), Job, JOB)
    parser.set_defaults(run=run)


class RecordedRun(NamedTuple):
    """A run whose journal is given in place of a trace: its workload, its scenario, and the policy
    that it had, which comes first. `doubt`: why there is no verdict, if its replay is not it."""

    trace: Trace
    scenario: Scenario
    policy: PolicyFile
    doubt: str = ""


def run(
    given: argparse.Namespace,
    recorded: RecordedRun | None = None,
    default: str | Scenario = DEFAULT_SCENARIO,
) -> None:
    """Run the command, on the trace that is given or on a recorded run; in the `default` scenario,
    or that of the run, if none is named.

    Raises RolloutError, TraceError or OSError before any work if an input cannot be used. On Ctrl-C
    it reports the finished runs and raises KeyboardInterrupt.
    """
    options = ReplayOptions(**given_flags(given, ReplayOptions))
    axes = [axis(text) for text in options.axes]
    policies = _policies(options, [one for one in axes if is_of_policies(one)], recorded)
    of_worlds = [one for one in axes if not is_of_policies(one)]
    default = default if recorded is None else recorded.scenario
    worlds = _worlds(options, of_worlds, given_flags(given, Job), default)
    _check_files(options, several=len(worlds) > 1)
    trace, doubt = (recorded.trace, recorded.doubt) if recorded else (read_trace(given), "")
    replays = Replays(options, trace, policies, given.command, doubt)
    for world in worlds:
        replays.check(world.scenario)
    if len(worlds) == 1:
        replays.one(worlds[0].scenario)
    else:
        replays.several(worlds)


class Replays(NamedTuple):
    """The policies to replay on a trace, in any scenario; `command` is what was typed. `doubt`: in
    place of the verdict."""

    options: ReplayOptions
    trace: Trace
    policies: Sequence[PolicyFile]
    command: str
    doubt: str = ""

    def check(self, scenario: Scenario) -> None:
        """Raises RolloutError if something can never fit, or a policy cannot be built."""
        traffic = scenario.traffic
        workload = Workload(self.trace, scenario.job, steps=self.options.steps, traffic=traffic)
        workload.check_fits(scenario)
        for policy in self.policies:
            policy.build(lengths=workload.length)
            settings_of(policy)
            reward_settings_of(policy)

    def one(self, scenario: Scenario) -> None:
        """Replay and report one scenario."""

        def write(runs: Runs, resamples: Runs) -> None:
            load = Workload(self.trace, scenario.job, steps=self.options.steps)
            writers: dict[str, Write] = {
                "json": reports.as_json,
                "html": lambda report: report_page(report, runs, load, self._made()),
            }
            _write(self.options, self.report(scenario, runs, resamples), shown, writers)

        try:
            runs, resamples = self._run(scenario, records=bool(self.options.html))
        except Interrupted as interrupted:
            if interrupted.runs:
                write(interrupted.runs, [])
            missing = self.policies[len(interrupted.runs) :]
            names = " ".join(f"--policy {policy.name}" for policy in missing)
            print(f"interrupted; not finished: {names}", file=sys.stderr)
            raise KeyboardInterrupt from interrupted
        write(runs, resamples)

    def several(self, worlds: Sequence[World]) -> None:
        """Replay and report a grid of scenarios."""
        found: dict[int, dict[str, Any]] = {}
        try:
            self._report_each(worlds, found)
        except (Interrupted, KeyboardInterrupt) as interrupted:
            missing = [world.said for number, world in enumerate(worlds) if number not in found]
            print(f"interrupted; not finished: {', '.join(missing)}", file=sys.stderr)
            raise KeyboardInterrupt from interrupted
        finally:
            if found:
                writers: dict[str, Write] = {
                    "json": reports.as_json,
                    "html": lambda sweep: sweep_page(sweep, self._made()),
                }
                whole = sorted(found)
                document = sweep_document([found[n] for n in whole], [worlds[n] for n in whole])
                _write(self.options, document, _shown_sweep, writers)

    def _report_each(self, worlds: Sequence[World], found: dict[int, dict[str, Any]]) -> None:
        """Put each world's report into `found`. With `--jobs` N it runs N worlds in parallel; if
        there are fewer worlds than that, it runs one world at a time with N parallel runs."""
        jobs = self.options.jobs
        if not 1 < jobs <= len(worlds):
            for number, world in enumerate(worlds):
                found[number] = self.report(world.scenario, *self._run(world.scenario))
            return
        with _progress("worlds") as bar:
            task = bar.add_task("sweep", total=len(worlds))
            alone = self._replace(options=msgspec.structs.replace(self.options, jobs=1))
            with WorkerPool(alone.report_of, jobs) as workers:
                for number, report in workers.finished([world.scenario for world in worlds]):
                    found[number] = report
                    bar.advance(task)

    def _run(self, scenario: Scenario, *, records: bool = False) -> tuple[Runs, Runs]:
        groups = len(Workload(self.trace, scenario.job, steps=self.options.steps).groups)
        runs = len(self.policies) * (self.options.seeds + self.options.resamples)
        with _progress("groups") as bar:
            task = bar.add_task("", total=groups * runs)

            def follow(run: str) -> Deliveries:
                bar.update(task, description=run)
                return lambda groups: bar.advance(task, groups)

            return self.runs(scenario, follow, records=records)

    def runs(
        self,
        scenario: Scenario,
        follow: Callable[[str], Deliveries] | None = None,
        *,
        records: bool = False,
    ) -> tuple[Runs, Runs]:
        """The runs of the trace and of its resamples; `follow` reports the progress of each."""

        def progress(what: str) -> Callable[[str, int], Deliveries] | None:
            return follow and (lambda policy, number: follow(f"{policy}, {what} {number}"))

        options = self.options
        runs = replay(
            self.trace,
            self.policies,
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
                self.trace,
                self.policies,
                scenario,
                steps=options.steps,
                resamples=options.resamples,
                jobs=options.jobs,
                progress=progress("resample"),
            )
        except Interrupted as interrupted:
            raise Interrupted(runs) from interrupted
        return runs, resamples

    def report_of(self, scenario: Scenario) -> dict[str, Any]:
        """Replay and report, without progress."""
        return self.report(scenario, *self.runs(scenario))

    def report(self, scenario: Scenario, runs: Runs, resamples: Runs) -> dict[str, Any]:
        steps, seeds = self.options.steps, self.options.seeds
        report = reports.document(
            self.trace, scenario, runs, steps=steps, seeds=seeds, resamples=resamples
        )
        within = self.options.max_staleness
        settings = {policy.name: policy.tables for policy in self.policies}
        best = fastest(report, within)
        return report | {
            "verdict": [self.doubt] if self.doubt else verdict(report, within, settings),
            "serve": None
            if self.doubt
            else best and self._serve(best["name"], scenario.fleet.instances),
        }

    def _made(self) -> list[str]:
        """What made a page, and when."""
        today = datetime.now(UTC).date().isoformat()
        return [self.command, f"rollout_sched {version('rollout-sched')}, {today}"]

    def _serve(self, policy: str, instances: int) -> str:
        """The command that puts a policy in front of as many instances."""
        policy = policy.removesuffix(IN_ROUNDS)
        for given in self.options.policies:
            stem = Path(given).name.removesuffix(".toml")
            if f"{policy} ".startswith(f"{stem} "):
                policy = given + policy[len(stem) :]
        servers = f"{{1..{instances}}}" if instances > 1 else "1"
        return f"rollout-sched serve --policy {quote(policy)} --instance=http://gpu-{servers}:8000"


def _shown_sweep(sweep: dict[str, Any], width: int, **_: bool) -> str:
    first = sweep["worlds"][0]
    text = f"{first['trace']}: {first['groups']} groups, {len(sweep['worlds'])} worlds"
    return f"{text}\n\n{table(sweep, width)}"


def _worlds(
    options: ReplayOptions,
    axes: Sequence[Axis],
    job: Mapping[str, Any],
    default: str | Scenario,
) -> list[World]:
    """Each scenario at each point of the axes, with the options of the job applied."""
    several = len(options.scenarios) > 1
    found = []
    given: list[str | Scenario] = list(options.scenarios)
    for one in given or [default]:
        for world in worlds(one, axes):
            scenario = world.scenario.with_job(job)
            said = f"{scenario.name} {world.said}".strip() if several else world.said
            found.append(World(scenario, said))
    if options.split:
        found = [one for world in found for one in split(world, options.split)]
    return found


def _policies(
    options: ReplayOptions, axes: Sequence[Axis], recorded: RecordedRun | None
) -> list[PolicyFile]:
    names: list[str | PolicyFile] = list(options.policies)
    names = names or [*_baseline_first(config.shipped("policies/presets"))]
    if recorded is not None:
        own = recorded.policy
        names = [own, *(name for name in names if name != own.name)]
    allow_code = options.allow_code
    found = policies_at(names, axes, allow_code=allow_code)
    known = [policy.name for policy in found]
    for name in known:
        # The policy's name (the file's stem) identifies its figures and journal.
        if known.count(name) > 1:
            raise CallerError(f"--policy: {name} is there twice; give each policy its own name")
    if options.baseline is None:
        return found
    baseline = config.load_policy(options.baseline, allow_code=allow_code)
    return [baseline, *(policy for policy in found if policy.name != baseline.name)]


def _baseline_first(names: Sequence[str]) -> list[str]:
    first = [name for name in BASELINES if name in names]
    return [*first, *(name for name in names if name not in first)]


def _check_files(options: ReplayOptions, *, several: bool) -> None:
    if several and options.journal is not None:
        raise CallerError("--journal works with one scenario only; replay that one alone")
    named = [getattr(options, name) for name in FORMATS]
    if named.count("-") > 1:
        raise CallerError("only one of --json and --html can be -")
    for file in (*named, options.journal):
        if file is not None and file != "-":
            check_writable(Path(file))


def _write(
    options: ReplayOptions,
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
        print(show(report, terminal.width(), full=options.full))


def shown(report: dict[str, Any], width: int, *, full: bool = False) -> str:
    """The answer as text in lines of at most `width` characters: one table, the verdict, and the
    command that follows from it, which is one line. With `full`, all tables before them; without
    training, there are no others."""
    parts = [heading(report, width)]
    if full or not report["prompts"]:
        parts += [bounds(report, width), tables(report, width)]
    if report["prompts"]:
        parts.append(answer(report, width))
    parts.append("\n".join(line for text in report["verdict"] for line in wrapped(text, width)))
    if report["serve"]:
        parts.append(f"Put it to work:\n  {report['serve']}")
    return "\n\n".join(part for part in parts if part)


def _progress(of: str) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed}}/{{task.total}} {of}"),
        TimeElapsedColumn(),
        console=terminal.console(stderr=True),
        transient=True,
    )
