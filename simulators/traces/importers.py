"""Other people's traces: one small function per format, chosen by the columns of the file.

An importer takes the rows of a file and yields (line number, sample). It keeps lengths, counts
and times, turns further columns into labels, and stops at the first row it cannot use.
Traces without groups become groups of one sample with arrival times.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import NamedTuple

from rollout_sched.simulators.traces.files import Lines
from rollout_sched.simulators.traces.model import Finish, Sample, TraceError, Turn
from rollout_sched.simulators.traces.native_format import SCHEMA
from rollout_sched.simulators.traces.rows import Row, cells, csv_rows, json_rows

Numbered = Iterator[tuple[int, Sample]]

# Thinking text of open models runs at 2.8-3.7 characters per token.
CHARS_PER_TOKEN = 3.3


@dataclass(frozen=True)
class Counting:
    """How to count the tokens of a text: with a tokenizer, or by its characters.

    tokenizer: text -> number of tokens; None counts characters.
    chars_per_token: characters in one token, used without a tokenizer.
    """

    tokenizer: Callable[[str], int] | None = None
    chars_per_token: float = CHARS_PER_TOKEN

    def __call__(self, text: str) -> int:
        """Tokens of the text, at least 1: even an empty output ended with a stop token."""
        if self.tokenizer is not None:
            return max(1, self.tokenizer(text))
        return max(1, math.ceil(len(text) / self.chars_per_token))

    @property
    def label(self) -> str:
        if self.tokenizer is not None:
            return "tokenizer"
        return f"characters / {self.chars_per_token}"


class Importer(NamedTuple):
    """columns: what a file of this format must have, by which it is recognised."""

    about: str
    columns: frozenset[str]
    convert: Callable[[Iterable[Row], Counting], Numbered]


def import_samples(where: str, lines: Lines, counting: Counting) -> tuple[str, Numbered]:
    """(what the format is, its numbered samples); TraceError if no importer knows it."""
    number, text = next(lines)
    again = chain([(number, text)], lines)
    if text.lstrip().startswith(("{", "[")):
        rows = json_rows(where, again)
        first = next(rows)
        importer = _recognised(where, number, first.fields.keys(), JSON_IMPORTERS)
        return importer.about, importer.convert(chain([first], rows), counting)
    header = [name.strip() for name in cells(where, number, text)]
    importer = _recognised(where, number, header, CSV_IMPORTERS)
    return importer.about, importer.convert(csv_rows(where, header, lines), counting)


def grouped_csv(rows: Iterable[Row], _: Counting) -> Numbered:
    """group_id, sample_idx, prompt_tokens, response_tokens [, truncated, arrival_s, labels...]."""
    used = ("group_id", "sample_idx", "prompt_tokens", "response_tokens", "truncated", "arrival_s")
    for row in rows:
        yield (
            row.line,
            Sample(
                group=row.text("group_id"),
                sample=row.whole("sample_idx"),
                prompt_tokens=row.tokens("prompt_tokens"),
                turns=(Turn(row.tokens("response_tokens")),),
                arrival_s=row.seconds("arrival_s") if "arrival_s" in row.fields else 0.0,
                finish=_finish(row),
                labels=row.labels(*used),
            ),
        )


def serving_csv(rows: Iterable[Row], _: Counting) -> Numbered:
    """t_s, prompt_tokens, response_tokens [, labels...]: a serving trace without groups."""
    for serial, row in enumerate(rows):
        arrival_s = row.seconds("t_s")
        labels = row.labels("t_s", "prompt_tokens", "response_tokens")
        yield _lone(row, serial, arrival_s, "prompt_tokens", "response_tokens", labels)


def azure_csv(rows: Iterable[Row], _: Counting) -> Numbered:
    """TIMESTAMP (date and time), ContextTokens, GeneratedTokens: Azure's published columns."""
    start = None
    for serial, row in enumerate(rows):
        try:
            at = datetime.fromisoformat(row.text("TIMESTAMP"))
            start = at if start is None else start
            arrival_s = (at - start).total_seconds()
        except (ValueError, TypeError) as error:
            raise row.error(
                "TIMESTAMP", "expected a date and time, like the first row's"
            ) from error
        if arrival_s < 0:
            raise row.error("TIMESTAMP", "sort the rows by time")
        yield _lone(row, serial, arrival_s, "ContextTokens", "GeneratedTokens")


def vidur_csv(rows: Iterable[Row], _: Counting) -> Numbered:
    """arrived_at (seconds), num_prefill_tokens, num_decode_tokens: Vidur's columns."""
    for serial, row in enumerate(rows):
        arrival_s = row.seconds("arrived_at")
        yield _lone(row, serial, arrival_s, "num_prefill_tokens", "num_decode_tokens")


def mooncake_jsonl(rows: Iterable[Row], _: Counting) -> Numbered:
    """timestamp (ms), input_length, output_length [, hash_ids]: Mooncake's records.

    The block hashes are left out: they tell of sharing between requests, not of lengths.
    """
    for serial, row in enumerate(rows):
        arrival_s = row.seconds("timestamp") / 1000
        yield _lone(row, serial, arrival_s, "input_length", "output_length")


def turns_jsonl(rows: Iterable[Row], _: Counting) -> Numbered:
    """{"g", "s", "p", "t": [[output, observation, seconds or null], ...]}: short-key turns."""
    for row in rows:
        outputs, observations, times = _columns(row, "t", row.list_of("t"))
        turns = _turns(row, ("t", outputs), ("t", observations), ("t", times))
        yield row.line, Sample(row.text("g"), row.whole("s"), row.tokens("p"), turns)


def replay_jsonl(rows: Iterable[Row], _: Counting) -> Numbered:
    """{"group", "stream", "prompt_len", "out_lens", "obs_lens", "tool_times"}: tpu-inference.

    obs_lens and tool_times may leave out the last turn, which nothing follows.
    """
    for row in rows:
        out, obs, times = (
            (key, row.list_of(key)) for key in ("out_lens", "obs_lens", "tool_times")
        )
        turns = _turns(row, out, obs, times)
        yield (
            row.line,
            Sample(row.text("group"), row.whole("stream"), row.tokens("prompt_len"), turns),
        )


def verl_jsonl(rows: Iterable[Row], counting: Counting) -> Numbered:
    """{"input", "output" [, "uid", "step", "score", ...]}: verl's rollout dump, counted by us.

    Group: the uid where there is one, else equal inputs within a step. The texts are dropped;
    step and score become labels, and so does the way of counting.
    """
    names: dict[tuple[str, str], str] = {}
    members: Counter[str] = Counter()
    for row in rows:
        step = row.text("step") if "step" in row.fields else "0"
        if "uid" in row.fields:
            group = row.text("uid")
        else:
            key = (step, row.text("input"))
            group = names.setdefault(key, f"step{step}-prompt{len(names)}")
        prompt, output = counting(row.text("input")), counting(row.text("output"))
        labels = {k: row.text(k) for k in ("step", "score") if row.fields.get(k) is not None}
        labels["tokens_counted_by"] = counting.label
        index = members[group]
        members[group] += 1
        sample = Sample(group, index, prompt, (Turn(output),), finish="unknown", labels=labels)
        yield row.line, sample


def quantiles_csv(rows: Iterable[Row], _: Counting) -> Numbered:
    """q, ...: quantiles of a distribution. There is nothing to replay in them: TraceError."""
    row = next(iter(rows), None)
    raise TraceError(
        row.where if row else "quantiles",
        "a table of quantiles (column 'q'), not of samples",
        "a replay needs one row per sample: record one, or make one with synthetic()",
        line=1,
    )


CSV_IMPORTERS: dict[str, Importer] = {
    "grouped": Importer(
        "grouped CSV",
        frozenset({"group_id", "sample_idx", "prompt_tokens", "response_tokens"}),
        grouped_csv,
    ),
    "serving": Importer(
        "serving CSV", frozenset({"t_s", "prompt_tokens", "response_tokens"}), serving_csv
    ),
    "azure": Importer(
        "Azure LLM inference CSV",
        frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),
        azure_csv,
    ),
    "vidur": Importer(
        "Vidur CSV",
        frozenset({"arrived_at", "num_prefill_tokens", "num_decode_tokens"}),
        vidur_csv,
    ),
    "quantiles": Importer("quantiles", frozenset({"q"}), quantiles_csv),
}

JSON_IMPORTERS: dict[str, Importer] = {
    "turns": Importer("short-key turns JSONL", frozenset({"g", "s", "p", "t"}), turns_jsonl),
    "replay": Importer(
        "tpu-inference replay JSONL",
        frozenset({"group", "stream", "prompt_len", "out_lens", "obs_lens", "tool_times"}),
        replay_jsonl,
    ),
    "mooncake": Importer(
        "Mooncake JSONL",
        frozenset({"timestamp", "input_length", "output_length"}),
        mooncake_jsonl,
    ),
    "verl": Importer("verl rollout dump", frozenset({"input", "output"}), verl_jsonl),
}


def _recognised(
    where: str, line: int, columns: Iterable[str], importers: dict[str, Importer]
) -> Importer:
    """The importer whose columns are all there; if none is, say what the nearest lacks."""
    present = set(columns)
    for importer in importers.values():
        if importer.columns <= present:
            return importer
    # The likeliest intent: most columns right, and at equal number the fewest missing.
    near = max(
        importers.values(), key=lambda i: (len(i.columns & present), -len(i.columns - present))
    )
    missing = ", ".join(sorted(near.columns - present))
    if near.columns & present:
        found = f"looks like {near.about}, but lacks: {missing}"
        raise TraceError(where, found, "add the missing columns", line=line, field=missing)
    known = "; ".join(f"{i.about} ({', '.join(sorted(i.columns))})" for i in importers.values())
    shown = ", ".join(map(repr, list(columns)[:8]))
    raise TraceError(
        where,
        f"no known trace format begins with {shown}",
        f"write {SCHEMA!r} (docs/trace_format.md) or one of: {known}",
        line=line,
    )


def _finish(row: Row) -> Finish:
    if "truncated" not in row.fields:
        return "unknown"
    flag = row.text("truncated").strip().lower()
    if flag not in ("0", "1", "false", "true"):
        raise row.error("truncated", "expected 0 or 1")
    return "length" if flag in ("1", "true") else "stop"


def _lone(
    row: Row,
    serial: int,
    arrival_s: float,
    prompt: str,
    output: str,
    labels: dict[str, str] | None = None,
) -> tuple[int, Sample]:
    """A sample that is a group of its own, from a source that knows no groups."""
    turns = (Turn(row.tokens(output)),)
    sample = Sample(
        str(serial), 0, row.tokens(prompt), turns, arrival_s, "unknown", None, labels or {}
    )
    return row.line, sample


def _columns(row: Row, field: str, turns: list[object]) -> tuple[list[object], ...]:
    """[[output, observation, seconds], ...] as three lists."""
    if not all(isinstance(turn, list) and len(turn) == 3 for turn in turns):
        raise row.error(field, "expected [output, observation, seconds or null] for every turn")
    return tuple([turn[i] for turn in turns if isinstance(turn, list)] for i in range(3))


def _turns(
    row: Row,
    outputs: tuple[str, list[object]],
    observations: tuple[str, list[object]],
    times: tuple[str, list[object]],
) -> tuple[Turn, ...]:
    """Turns from three (field, values) lists; what is said to follow the last turn is dropped."""
    field, lengths = outputs
    if not lengths:
        raise row.error(field, "expected at least one turn")
    for other, values in (observations, times):
        if len(values) not in (len(lengths), len(lengths) - 1):
            raise row.error(other, f"expected one value per turn of {field} ({len(lengths)})")
    tokens = [row.checked_whole(field, value, least=1) for value in lengths]
    heard = [row.checked_whole(observations[0], value, least=0) for value in observations[1]]
    waited = [row.checked_seconds(times[0], 0.0 if value is None else value) for value in times[1]]
    followed = [Turn(*turn) for turn in zip(tokens[:-1], heard, waited, strict=False)]
    return (*followed, Turn(tokens[-1]))
