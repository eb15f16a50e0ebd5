"""The command `rollout-sched trace`, and the options by which commands choose a trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from rollout_sched import terminal
from rollout_sched.flags import above_zero
from rollout_sched.simulators.traces.lengths import LengthModel, has_cut, intraclass_correlation
from rollout_sched.simulators.traces.model import TOKENS_PER_S, Counting, Trace, with_tokenizer
from rollout_sched.simulators.traces.store import read, shipped, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    stats = verbs.add_parser(
        "stats",
        help="lengths, tail and similarity within groups",
        epilog="example: rollout-sched trace stats lrm_token_economy",
    )
    add_trace(stats)
    stats.add_argument("--json", action="store_true", help="as JSON")
    stats.set_defaults(run=_stats)
    convert = verbs.add_parser(
        "convert",
        help="rewrite any readable trace in the native format",
        epilog="example: rollout-sched trace convert my_dump.parquet mine.jsonl",
    )
    add_trace(convert)
    convert.add_argument("output", metavar="OUTPUT", type=Path)
    convert.set_defaults(run=_convert)
    listed = verbs.add_parser(
        "list", help="list the shipped traces", epilog="example: rollout-sched trace list"
    )
    listed.set_defaults(run=_list)


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
        if value is None:
            continue
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


class TraceStatistics(msgspec.Struct, frozen=True):
    """Numbers about a trace; lengths in tokens, times in seconds, quantiles interpolated.

    response_max_over_p50 and response_cv (standard deviation / mean) measure how heavy the tail is.
    icc_log: share of the variance of log length that lies between groups, 0 to 1 (below 0 if
        lengths within groups are less alike than by chance); None if no group has two samples.
    truncated_share: samples cut at a cap, so that their true length is unknown.
    cut_share: samples cut otherwise, by a policy, an abort or the end of the recording.
    completed_mean, completed_p50, completed_p90, completed_p99: of responses, with the cut ones
        completed as in a replay; None if none was cut.
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
    cut_share: float
    completed_mean: float | None
    completed_p50: float | None
    completed_p90: float | None
    completed_p99: float | None
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
    completed = _completed(trace)
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
        cut_share=sum(s.finish == "cut" for s in samples) / len(samples),
        completed_mean=completed[0],
        completed_p50=completed[1],
        completed_p90=completed[2],
        completed_p99=completed[3],
        tool_s_mean=float(tool_s.mean()),
        tool_s_max=float(tool_s.max()),
        tokens_estimated_by=trace.estimated_by or None,
        left_out=trace.left_out,
    )


#: Completions of a trace whose figures are averaged.
_COMPLETIONS = 8


def _completed(trace: Trace) -> list[float] | list[None]:
    """Mean, p50, p90 and p99 of the responses, with the cut ones completed."""
    if not has_cut(trace):
        return [None] * 4
    model, found = LengthModel(trace), []
    for seed in range(_COMPLETIONS):
        completed = model.completed(trace, seed)
        lengths = np.array([sample.response_tokens for sample in completed.samples()])
        found.append([lengths.mean(), *np.quantile(lengths, [0.5, 0.9, 0.99])])
    figures: list[float] = np.mean(found, axis=0).tolist()
    return figures
