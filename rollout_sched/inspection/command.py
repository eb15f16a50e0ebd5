"""The command `rollout-sched journal`: reads the journal of a live or replayed run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from rollout_sched.inspection.recording import Recording, rows, summary
from rollout_sched.inspection.run_scenario import run_scenario
from rollout_sched.inspection.timeline import TimelineFold, journal_page
from rollout_sched.inspection.trace_fold import recorded_trace
from rollout_sched.journal import files
from rollout_sched.metrics.fold import Folded
from rollout_sched.process import check_writable, whole_file
from rollout_sched.simulators import traces
from rollout_sched.simulators.replay import load_scenario
from rollout_sched.simulators.replay.command import DEFAULT_SCENARIO


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, run, says, more in (
        ("summary", _summary, "print the figures of the run", ""),
        (
            *("trace", _trace, "write a trace of the run, for replays under other policies"),
            "--out run.jsonl",
        ),
        ("scenario", _scenario, "write the scenario of the run, for replays", "--out run.toml"),
        (
            *("timeline", _timeline, "draw the run as a page or as Chrome's trace events"),
            "--html run.html",
        ),
        ("cat", _cat, "print each event and the scheduler's actions as a line of JSON", ""),
    ):
        example = f"example: rollout-sched journal {name} run.journal {more}".rstrip()
        verb = verbs.add_parser(name, help=says, epilog=example)
        several = name in ("trace", "scenario")
        verb.add_argument(
            "journal",
            type=Path,
            metavar="FILE",
            nargs="+" if several else None,
            help="plain or gzip" + "; several: of one run" * several,
        )
        verb.add_argument(
            "--policy",
            metavar="NAME_OR_TOML",
            help="policy of the recorded run; default: that in the journal",
        )
        verb.add_argument(
            "--allow-code", action="store_true", help="import classes of your own that it names"
        )
        verb.set_defaults(run=run)
        if name == "summary":
            verb.add_argument("--json", action="store_true", help="print JSON")
        if several:
            verb.add_argument("--out", type=Path, required=True, metavar="FILE")
        if name == "scenario":
            verb.add_argument(
                "--base",
                default=DEFAULT_SCENARIO,
                metavar="NAME_OR_TOML",
                help="scenario that has what the run does not tell; default: %(default)s",
            )
        if name == "timeline":
            kinds = verb.add_mutually_exclusive_group(required=True)
            kinds.add_argument(
                "--out", type=Path, metavar="FILE", help="Chrome's trace events, for Perfetto"
            )
            kinds.add_argument("--html", type=Path, metavar="FILE", help="a page for a browser")


def _summary(options: argparse.Namespace) -> None:
    found = summary(_recording(options))
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    print(f"{options.journal}: {found['policy']}, {found['instances']} instances")
    shown_rows = rows(found)
    width = max(len(label) for label, _ in shown_rows)
    for label, shown in shown_rows:
        print(f"  {label:{width}}  {shown:>12}")


def _trace(options: argparse.Namespace) -> None:
    trace, lacks = recorded_trace(
        options.out.name.split(".")[0],
        [_recording(options, path) for path in _without_parts(options.journal)],
    )
    traces.write(trace, options.out)
    print(f"{options.out}: {trace.sample_count} samples of {len(trace.groups)} groups")
    if trace.prompts_per_step is not None:
        print(f"  steps of {trace.prompts_per_step} prompts x {trace.group_size} samples")
    cut = sum(sample.finish == "cut" for sample in trace.samples())
    lacks += [f"the ends of {cut} samples, which were cut"] * bool(cut)
    for one in lacks:
        print(f"  without {one}")


def _scenario(options: argparse.Namespace) -> None:
    check_writable(options.out)
    recordings = [_recording(options, path) for path in _without_parts(options.journal)]
    trace, _ = recorded_trace(options.out.name.split(".")[0], recordings)
    found = run_scenario(recordings, trace, load_scenario(options.base))
    with whole_file(options.out) as file:
        file.write(found.text.encode())
    print(f"{options.out}: scenario of a run of {found.times.total_s:,.0f} s")


def _without_parts(paths: list[Path]) -> list[Path]:
    """The journals without those that a crash left empty, and without the files that are read with
    the one after them."""
    written = [path for path in paths if path.stat().st_size] or paths
    parts = {before for path in written for before in files(path)[:-1]}
    return [path for path in written if path not in parts]


def _timeline(options: argparse.Namespace) -> None:
    if options.html is not None:
        _page(options)
        return
    check_writable(options.out)
    fold = TimelineFold()
    end_s = _recording(options).tell([Folded(fold.spans, fold).observe])
    events = fold.events(end_s)
    with whole_file(options.out) as file:
        file.write(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))
    print(f"{options.out}: {len(events)} events; open it at https://ui.perfetto.dev")


def _page(options: argparse.Namespace) -> None:
    check_writable(options.html)
    drawn = journal_page(_recording(options))
    with whole_file(options.html) as file:
        file.write(drawn)
    print(f"{options.html}: open it in a browser")


def _cat(options: argparse.Namespace) -> None:
    encode = msgspec.json.Encoder().encode

    def show(now: float, event: Any, actions: Any) -> None:
        line = encode({"now": now, "event": event, "actions": list(actions)})
        sys.stdout.write(line.decode() + "\n")

    _recording(options).tell([show])


def _recording(options: argparse.Namespace, path: Path | None = None) -> Recording:
    return Recording(path or options.journal, options.policy, allow_code=options.allow_code)
