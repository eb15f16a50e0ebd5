"""The command `rollout-sched trace`, and the options by which commands choose a trace."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from rollout_sched.flags import number
from rollout_sched.simulators.traces.model import TOKENS_PER_S, Counting, Trace, with_tokenizer
from rollout_sched.simulators.traces.statistics import statistics
from rollout_sched.simulators.traces.store import read, shipped, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    stats = verbs.add_parser("stats", help="lengths, tail and similarity within groups")
    add_trace(stats)
    stats.add_argument("--json", action="store_true", help="as JSON")
    stats.set_defaults(run=_stats)
    convert = verbs.add_parser("convert", help="rewrite any readable trace in the native format")
    add_trace(convert)
    convert.add_argument("output", metavar="OUTPUT", type=Path)
    convert.set_defaults(run=_convert)
    verbs.add_parser("list", help="list the shipped traces").set_defaults(run=_list)


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Add the options for the trace, and for counting tokens if it has no counts."""
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="a file, a folder, a 'pattern*', - for standard input, or a shipped trace's name",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="for traces of texts: a tokenizer.json, or the folder of its model",
    )
    parser.add_argument(
        "--tokens-per-s",
        type=_rate,
        metavar="N",
        default=TOKENS_PER_S,
        help="for traces of times: generation speed of one request; default: %(default)g",
    )


def read_trace(options: argparse.Namespace) -> Trace:
    """The trace that the options of `add_trace` name. Raises TraceError."""
    counting = Counting(tokens_per_s=options.tokens_per_s)
    if options.tokenizer is not None:
        counting = with_tokenizer(options.tokenizer, counting)
    return read(options.trace, counting)


def _rate(text: str) -> float:
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not more than 0")
    return value


def _stats(options: argparse.Namespace) -> None:
    numbers = statistics(read_trace(options))
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(numbers), indent=2).decode())
        return
    result = Table(show_header=False)
    for name, value in msgspec.structs.asdict(numbers).items():
        shown = f"{value:,.2f}" if isinstance(value, float) else f"{value}"
        result.add_row(name.replace("_", " "), shown)
    Console().print(result)


def _convert(options: argparse.Namespace) -> None:
    trace = read_trace(options)
    write(trace, options.output)
    print(f"{options.output}: {trace.sample_count} samples of {len(trace.groups)} groups")


def _list(options: argparse.Namespace) -> None:
    for name, about in shipped().items():
        print(f"{name:32s} {about}")
