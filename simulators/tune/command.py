"""The command `rollout-sched tune`: find the policy for a trace, a fleet and the user's limits, and
write it with the evidence."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rollout_sched import terminal
from rollout_sched.core.errors import CallerError
from rollout_sched.flags import Flag, add_flags, given_flags
from rollout_sched.process import check_writable, whole_file
from rollout_sched.simulators.guess.command import add_fleet_arguments, fleet_words, guessed_fleet
from rollout_sched.simulators.replay import Job, load_scenario
from rollout_sched.simulators.replay.command import RecordedRun
from rollout_sched.simulators.replay.tables import Column, grid, legend, wrapped
from rollout_sched.simulators.traces.command import add_trace, read_trace
from rollout_sched.simulators.traces.model import TOKENS_PER_S
from rollout_sched.simulators.tune.candidates import Candidate
from rollout_sched.simulators.tune.evaluation import Evaluator, HardLimits, SpeedUp, bench_of
from rollout_sched.simulators.tune.search import Plan, Ranking, TuningResult, steps_for, tune
from rollout_sched.simulators.tune.space import Table
from rollout_sched.workers import Jobs, WorkerPool

#: Default seconds of a search.
BUDGET_S = 120.0

#: The fields of a job that have a flag.
_JOB = ("prompts_per_step", "epochs", "known_samples")


class TuneOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is tuned, and where the result goes.

    scenario  the fleet and the job; a journal has its own
    out       the policy file to write
    jobs      processes (default: one per core)
    """

    out: Annotated[Path, Flag(metavar="FILE")]
    scenario: Annotated[str, Flag(metavar="NAME_OR_TOML")] = ""
    jobs: Jobs | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace(parser)
    add_flags(parser, TuneOptions)
    add_flags(parser, HardLimits)
    add_flags(parser.add_mutually_exclusive_group(), Plan, ["seconds", "evaluations"])
    add_flags(parser, Plan, ["held_out_seeds", "seed"])
    add_fleet_arguments(parser)
    add_flags(parser.add_argument_group("job", "in place of the scenario's"), Job, _JOB)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace, recorded: RecordedRun | None = None) -> None:
    """Tune for the trace that is given, or for a recorded run; write the policy file, and print the
    findings; all of the file if it cannot be written. Raises CallerError and the like."""
    options = TuneOptions(**given_flags(given, TuneOptions))
    limits = HardLimits(**given_flags(given, HardLimits))
    plan = Plan(steps_for(limits.max_staleness), **given_flags(given, Plan))
    if plan.evaluations is None and plan.seconds is None:
        plan = msgspec.structs.replace(plan, seconds=BUDGET_S)
    check_writable(options.out)
    trace = read_trace(given) if recorded is None else recorded.trace
    scenario = guessed_fleet(given, instead=bool(options.scenario or recorded))
    if options.scenario:
        scenario = load_scenario(options.scenario)
    elif recorded is not None:
        scenario = recorded.scenario
    if scenario is None:
        raise CallerError("--scenario is missing: the fleet and the job; or --gpu and --model")
    bench = bench_of(trace, scenario.with_job(given_flags(given, Job)), seed=plan.seed)
    jobs = options.jobs or os.cpu_count() or 1
    with WorkerPool(bench, jobs) as workers, _progress() as bar:
        task = bar.add_task("evaluations")
        in_use = recorded and recorded.policy
        told = partial(bar.advance, task)
        result = tune(bench, limits, plan, workers, in_use=in_use, told=told)
    text = document(result, bench, limits, plan, command_of(given, result))
    try:
        with whole_file(options.out) as file:
            file.write(text.encode())
    except OSError:
        print(text)
        raise
    print(*report(result, bench, limits, plan, terminal.width()), sep="\n")
    print(f"\nthe search ended: {result.ended}\n{options.out}: {result.winner.name}")


def command_of(given: argparse.Namespace, result: TuningResult) -> str:
    """The command that reproduces the file on any machine."""
    options = TuneOptions(**given_flags(given, TuneOptions))
    limits = HardLimits(**given_flags(given, HardLimits))
    seeds = len(result.finalists.cases) if result.finalists.held_out else 0
    words = [
        *("rollout-sched", "tune", given.trace),
        *(("--scenario", options.scenario) if options.scenario else fleet_words(given)),
        *("--max-staleness", limits.max_staleness),
        *("--max-length-bias", f"{limits.max_length_bias:g}"),
        *("--max-step-bias", f"{limits.max_step_bias:g}"),
        *("--evaluations", result.evaluations, "--held-out-seeds", seeds),
        *("--seed", given_flags(given, Plan).get("seed", 0)),
    ]
    for key, value in given_flags(given, Job).items():
        words += [f"--{key.replace('_', '-')}", value]
    if given.columns:
        words += ["--columns", given.columns]
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
        console=terminal.console(stderr=True),
        transient=True,
    )


# ------------------------------------------------------------------------------------------
# The evidence: what was tried and measured, printed, and in comments of the policy file.

#: Of a line in the policy file.
WIDTH = 98

COLUMNS = (
    Column("speed-up", "speed", str, "accepted tokens/s over the baseline's, 95 % interval"),
    Column("stale mean", "stale", str, "versions behind, over the samples"),
    Column("stale max", "max", str, "of any sample"),
    Column("length ratio", "ratio", str, "mean length trained over requested"),
    Column("longest tenth", "tenth", str, "share of it that was trained"),
    Column("step bias", "bias", str, "KS distance of a step's lengths from all, beyond chance"),
    Column("discarded", "discarded", str, "tokens, of those generated"),
)


def document(
    result: TuningResult, bench: Evaluator, limits: HardLimits, plan: Plan, command: str
) -> str:
    """The policy file: the measurements in comments, then the policy. Ends with a newline.

    It has no date, so that the same command gives the same file.
    """
    lines = [command, "", *report(result, bench, limits, plan, WIDTH)]
    head = "\n".join(f"# {line}".rstrip() for line in lines)
    return f"{head}\n\n{policy_file(result, bench)}"


def report(
    result: TuningResult, bench: Evaluator, limits: HardLimits, plan: Plan, width: int
) -> list[str]:
    """What was found and why, then what was tried; in lines of at most `width` characters."""

    def table(title: str, shown: Ranking) -> list[str]:
        ranked = _ranked(shown, result.winner)
        names = [_named(shown, one, limits, result.winner) for one in ranked]
        figures = [_row(shown, one) for one in ranked]
        return [*wrapped(_title(shown, title), width), *grid(COLUMNS, names, figures, width), ""]

    return [
        *wrapped(_why(result, limits), width),
        "",
        *table("Finalists", result.finalists),
        *table("Pareto frontier", _frontier(result)),
        *wrapped(legend(COLUMNS), width),
        "",
        *(line for fact in facts(result, bench, limits, plan) for line in wrapped(fact, width)),
    ]


def _why(result: TuningResult, limits: HardLimits) -> str:
    """The winner, its speed-up, and what it is preferred to."""
    finalists, winner = result.finalists, result.winner
    speed = _over(finalists, winner, finalists.reference)
    faster = [
        one
        for one in finalists.candidates
        if finalists.figures(one).tokens_per_s > finalists.figures(winner).tokens_per_s
    ]
    within = [one.name for one in faster if not limits.exceeded(finalists.figures(one))]
    why = "the fastest finalist within the limits"
    if within:
        why = f"simpler than {', '.join(within)}, and slower by no more than chance and 2 %"
    beyond = f"; faster ones exceed a limit: {len(faster) - len(within)}"
    gain = f", {speed} of {_name(finalists.reference)}" if speed else ""
    return f"The winner: {winner.name}{gain}; {why}{beyond * (len(faster) > len(within))}."


def facts(result: TuningResult, bench: Evaluator, limits: HardLimits, plan: Plan) -> list[str]:
    """What was replayed, how much of it, and the limits."""
    job = bench.scenario.job
    search, held_out = len(bench.search.groups), len(bench.held_out.groups)
    prompts = (
        f"{search} prompts to search, {held_out} others held out"
        if bench.split
        else f"{search} prompts, too few to hold some out, so that only seeds are"
    )
    lengths = [rung[0].steps for rung in plan.rungs]
    return [
        f"{bench.search.name} on {bench.scenario.name}: {prompts}; {job.samples_per_prompt} "
        f"samples each, {job.prompts_per_step} prompts a step, {job.epochs} epoch(s)",
        *([f"tokens are estimated: {how}"] if (how := bench.search.estimated_by) else []),
        f"search: {result.evaluations} evaluations of {', '.join(map(str, lengths))} steps on 1 to "
        f"{max(map(len, plan.rungs))} seeds",
        f"allowed: staleness {limits.max_staleness}, length bias {limits.max_length_bias:g}, step "
        f"bias {limits.max_step_bias:g}",
    ]


def _ranked(ranking: Ranking, winner: Candidate) -> list[Candidate]:
    """The winner, then the others, fastest first."""
    return sorted(
        ranking.candidates,
        key=lambda one: (one.key != winner.key, -ranking.figures(one).tokens_per_s),
    )


def _over(ranking: Ranking, one: Candidate, reference: Candidate | None) -> SpeedUp | None:
    if reference is None or ranking.figures(one).failed:
        return None
    return ranking.speed_up(one, reference)


def _name(reference: Candidate | None) -> str:
    return "" if reference is None else reference.name


def _named(ranking: Ranking, one: Candidate, limits: HardLimits, winner: Candidate) -> str:
    won = one.key == winner.key
    notes = ["the winner"] if won else limits.exceeded(ranking.figures(one))
    return one.name + (f" ({'; '.join(notes)})" if notes else "")


def _row(ranking: Ranking, one: Candidate) -> dict[str, str | None]:
    """By the paths of COLUMNS."""
    figures = ranking.figures(one)
    speed = _over(ranking, one, ranking.reference)
    return {
        "speed": f"{speed.mean:.2f}x {speed.low:.2f}-{speed.high:.2f}" if speed else None,
        "stale": f"{figures.staleness_mean:.2f}",
        "max": str(figures.staleness_max),
        "ratio": f"{figures.length_ratio:.3f}",
        "tenth": f"{figures.longest_kept:.3f}",
        "bias": f"{figures.step_bias:.3f}",
        "discarded": f"{100 * figures.discarded:.1f} %",
    }


def _frontier(result: TuningResult) -> Ranking:
    """The search's candidates on the Pareto frontier, and the reference."""
    searched = result.searched
    kept = searched.frontier()
    if searched.reference is not None and searched.reference not in kept:
        kept.append(searched.reference)
    return Ranking(kept, searched.cases, searched.book)


def _title(ranking: Ranking, what: str) -> str:
    seeds = [case.seed for case in ranking.cases]
    where = "held-out prompts" if ranking.held_out else "the search's prompts"
    return (
        f"{what}: {ranking.cases[0].steps} steps of {where}, seeds "
        f"{', '.join(map(str, seeds))}; speed in accepted tokens/s"
    )


def policy_file(result: TuningResult, bench: Evaluator) -> str:
    """The winner as TOML, without the evidence."""
    finalists = result.finalists
    figures = finalists.figures(result.winner)
    reference = finalists.reference
    speed = _over(finalists, result.winner, reference)
    where = "held-out prompts and seeds" if finalists.held_out else "the prompts searched on"
    gain = f"{speed} times {_name(reference)} on {where}, " if speed else ""
    about = (
        f"Tuned for {bench.search.name} on {bench.scenario.name}: {gain}staleness at most "
        f"{figures.staleness_max}, mean {figures.staleness_mean:.2f}."
    )
    return "\n".join(
        [f"about = {_value(about)}", 'source = "rollout-sched tune"', *_roles(result.winner.table)]
    )


def _roles(table: Table) -> list[str]:
    lines = []
    for role, row in table.items():
        lines += ["", f"[{role}]", *(f"{key} = {_value(value)}" for key, value in row.items())]
    return [*lines, ""]


def _value(value: Any) -> str:
    """A string, number or boolean in TOML, which has the same form as in JSON."""
    return json.dumps(value, ensure_ascii=False)
