"""The command `rollout-sched trace`, and the options by which commands choose a trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from rich.table import Table

from rollout_sched import terminal
from rollout_sched.flags import above_zero
from rollout_sched.simulators.traces.model import TOKENS_PER_S, Counting, Trace, with_tokenizer
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
        "--columns",
        metavar="FIELD=NAME,...",
        default="",
        help="for a table of your own: its names of group and response, and of prompt, sample, "
        "arrival, finish if it has them",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="for traces of texts: a tokenizer.json, or the folder of its model",
    )
    parser.add_argument(
        "--tokens-per-s",
        type=above_zero,
        metavar="N",
        default=TOKENS_PER_S,
        help="for traces of times: generation speed of one request; default: %(default)g",
    )


def read_trace(options: argparse.Namespace) -> Trace:
    """The trace that the options of `add_trace` name. Raises TraceError.

    Prints to standard error how many requests were left out.
    """
    counting = Counting(tokens_per_s=options.tokens_per_s)
    if options.tokenizer is not None:
        counting = with_tokenizer(options.tokenizer, counting)
    pairs = [pair.partition("=") for pair in options.columns.split(",") if pair]
    trace = read(options.trace, counting, {field: column for field, _, column in pairs})
    if trace.left_out:
        left_out = f"requests without tokens, which are left out: {trace.left_out}"
        print(f"{options.trace}: {left_out}", file=sys.stderr)
    return trace


def _stats(options: argparse.Namespace) -> None:
    numbers = statistics(read_trace(options))
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(numbers), indent=2).decode())
        return
    result = Table(show_header=False)
    for name, value in msgspec.structs.asdict(numbers).items():
        shown = f"{value:,.2f}" if isinstance(value, float) else f"{value}"
        result.add_row(name.replace("_", " "), shown)
    terminal.console().print(result)


def _convert(options: argparse.Namespace) -> None:
    trace = read_trace(options)
    write(trace, options.output)
    print(f"{options.output}: {trace.sample_count} samples of {len(trace.groups)} groups")


def _list(options: argparse.Namespace) -> None:
    for name, about in shipped().items():
        print(f"{name:32s} {about}")


# ------------------------------------------------------------------------------------------
# Statistics of a trace: quantiles of lengths, the tail, and similarity within groups.

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class TraceStatistics(msgspec.Struct, frozen=True):
    """Numbers about a trace; lengths in tokens, times in seconds, quantiles interpolated.

    response_max_over_p50 and response_cv (standard deviation / mean) measure how heavy the tail is.
    icc_log: share of the variance of log length that lies between groups, 0 to 1 (below 0 if
        lengths within groups are less alike than by chance); None if no group has two samples.
    truncated_share: samples cut at a cap, so that their true length is unknown.
    tool_s_mean, tool_s_max: time between turns, per sample.
    tokens_estimated_by: how the lengths were estimated, as "characters / 3.3"; None if counted.
    left_out: requests of the source that were left out because they have no tokens.
    """

    name: str
    samples: int
    groups: int
    group_size: int
    turns_mean: float
    turns_max: int
    prompt_mean: float
    prompt_p50: float
    prompt_p99: float
    response_total: int
    response_mean: float
    response_p50: float
    response_p90: float
    response_p99: float
    response_max: int
    response_max_over_p50: float
    response_cv: float
    icc_log: float | None
    truncated_share: float
    tool_s_mean: float
    tool_s_max: float
    tokens_estimated_by: str | None
    left_out: int


def statistics(trace: Trace) -> TraceStatistics:
    """Statistics of a trace that holds at least one sample."""
    samples = list(trace.samples())
    sizes = [len(members) for members in trace.groups.values()]
    response = np.array([s.response_tokens for s in samples], dtype=np.float64)
    prompt = np.array([s.prompt_tokens for s in samples], dtype=np.float64)
    turns = np.array([len(s.turns) for s in samples], dtype=np.int64)
    tool_s = np.array([s.tool_s for s in samples], dtype=np.float64)
    p50, p90, p99 = np.quantile(response, [0.5, 0.9, 0.99]).tolist()
    prompt_p50, prompt_p99 = np.quantile(prompt, [0.5, 0.99]).tolist()
    return TraceStatistics(
        name=trace.name,
        samples=len(samples),
        groups=len(sizes),
        group_size=trace.group_size,
        turns_mean=float(turns.mean()),
        turns_max=int(turns.max()),
        prompt_mean=float(prompt.mean()),
        prompt_p50=prompt_p50,
        prompt_p99=prompt_p99,
        response_total=int(response.sum()),
        response_mean=float(response.mean()),
        response_p50=p50,
        response_p90=p90,
        response_p99=p99,
        response_max=int(response.max()),
        response_max_over_p50=float(response.max()) / p50,
        response_cv=float(response.std() / response.mean()),
        icc_log=intraclass_correlation(np.log(response), np.repeat(np.arange(len(sizes)), sizes)),
        truncated_share=sum(s.finish == "length" for s in samples) / len(samples),
        tool_s_mean=float(tool_s.mean()),
        tool_s_max=float(tool_s.max()),
        tokens_estimated_by=trace.estimated_by or None,
        left_out=trace.left_out,
    )


def intraclass_correlation(values: Floats, group: Ints) -> float | None:
    """ICC(1) of values by group number: one-way random effects, groups of unequal size.

    (MSB - MSW) / (MSB + (n0 - 1) MSW), with mean squares between and within groups and
    n0 = (N - sum(n_i^2) / N) / (k - 1). None where it is undefined: fewer than two groups, no
    group of two, or no variance at all.
    Source: Donner (1986), the ANOVA estimator.
    """
    sizes = np.bincount(group).astype(np.float64)
    total, groups = float(sizes.sum()), len(sizes)
    if groups < 2 or total == groups:
        return None
    means = np.bincount(group, values) / sizes
    between = float((sizes * (means - values.mean()) ** 2).sum()) / (groups - 1)
    within = float(((values - means[group]) ** 2).sum()) / (total - groups)
    typical_size = (total - float((sizes**2).sum()) / total) / (groups - 1)
    variance = between + (typical_size - 1) * within
    return (between - within) / variance if variance > 0 else None
