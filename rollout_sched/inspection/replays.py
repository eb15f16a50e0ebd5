"""The commands `replay` and `tune`, which also take the journal of a run in place of a trace: its
workload and its scenario, with its policy as the baseline. First its own replay is held against it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rollout_sched import journal
from rollout_sched.flags import given_flags
from rollout_sched.inspection.recording import Recording
from rollout_sched.inspection.rounds import in_rounds
from rollout_sched.inspection.run_scenario import run_scenario, run_times
from rollout_sched.inspection.scenario_fold import RunTimes
from rollout_sched.inspection.trace_fold import recorded_trace
from rollout_sched.simulators import guess, replay, tune
from rollout_sched.simulators.replay import Job, load_scenario
from rollout_sched.terminal import seconds

#: A replay that is further from its run, in total, is no evidence.
BOUND = 0.05


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    replay.command.add_arguments(parser)
    guess.command.add_fleet_arguments(parser)
    parser.set_defaults(run=_replay)


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    tune.command.add_arguments(parser)
    parser.set_defaults(run=_tune)


def _replay(given: argparse.Namespace) -> None:
    options = replay.command.ReplayOptions(**given_flags(given, replay.command.ReplayOptions))
    recorded = journal.is_journal(given.trace)
    guessed = guess.command.guessed_fleet(given, instead=bool(options.scenarios) or recorded)
    if not recorded:
        replay.command.run(given, default=guessed or replay.command.DEFAULT_SCENARIO)
        return
    recording = Recording(Path(given.trace), allow_code=options.allow_code)
    run, said = recorded_run(recording, (*options.scenarios, "")[0], given)
    to_stdout = "-" in (options.json, options.html)
    print(said, file=sys.stderr if to_stdout else sys.stdout)
    replay.command.run(given, run)


def _tune(given: argparse.Namespace) -> None:
    if not journal.is_journal(given.trace):
        tune.command.run(given)
        return
    scenario = getattr(given, "TuneOptions.scenario", "")
    run, said = recorded_run(Recording(Path(given.trace)), scenario, given)
    print(said)
    tune.command.run(given, run)


def recorded_run(
    recording: Recording, scenario: str, given: argparse.Namespace
) -> tuple[replay.command.RecordedRun, str]:
    """The run, and how far its replay is from it, in words. `scenario`: in place of its own."""
    trace, lacks = recorded_trace(recording.path.name.split(".")[0], [recording])
    for one in lacks:
        print(f"{recording.path}: without {one}", file=sys.stderr)
    base = load_scenario(scenario or replay.command.DEFAULT_SCENARIO)
    own = run_scenario([recording], trace, base)
    policy = in_rounds(recording.policy) if own.in_rounds else recording.policy
    told = (base if scenario else own.scenario).with_job(given_flags(given, Job))
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / "journal.jsonl"
        replay.runs.run_policy(policy, trace, told, journal_path=again)
        copy = Recording(again, allow_code=recording.allow_code)
        said, doubt = _held_against(own.times, run_times([copy]))
    if own.in_rounds:
        said += (
            f"\nIts trainer sends requests and waits for all of them in {policy.name!r}; under the "
            f"others it submits groups."
        )
    return replay.command.RecordedRun(trace, own.scenario, policy, doubt), said


def _held_against(run: RunTimes, replayed: RunTimes) -> tuple[str, str]:
    """How far the replay is off, and why it is no evidence if it is too far."""
    off = replayed.total_s / run.total_s - 1 if run.total_s else 0.0
    said = (
        f"the run took {seconds(run.total_s)}; its replay says {seconds(replayed.total_s)} "
        f"({100 * abs(off):.1f} % off)"
    )
    if abs(off) <= BOUND:
        return said, ""
    parts = []
    for name in ("generation", "trainer", "weights"):
        took, says = getattr(run, f"{name}_s"), getattr(replayed, f"{name}_s")
        if abs(says - took) > BOUND * run.total_s / 3:
            parts.append(f"{name}: {seconds(took)}, in the replay {seconds(says)}")
    where = "; ".join(parts) or "where they overlap"
    doubt = (
        f"No verdict, because the replay of the run is {100 * abs(off):.1f} % off, more than "
        f"{100 * BOUND:.0f} % ({where}). Correct its scenario (rollout-sched journal scenario), "
        f"and ask again with --scenario."
    )
    return f"{said}: {where}", doubt
