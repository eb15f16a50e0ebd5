"""Foreign trace formats with one row per sample: tables with groups, and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime
from hashlib import blake2b

from rollout_sched.simulators.traces.model import (
    Counting,
    Finish,
    SamplePlace,
    SampleRecord,
    TraceError,
    Turn,
)
from rollout_sched.simulators.traces.rows import Importer, Placed, Row, without_tokens

_REST = ("prompt_tokens", "response_tokens", "truncated", "finish_reason", "arrival_s")

#: As engines and trainers say how a response ended.
_FINISHES: dict[str, Finish] = {
    "stop": "stop",
    "length": "length",
    "truncated": "length",
    "abort": "cut",
    "aborted": "cut",
}


def _table(about: str, group: str, sample: str) -> Importer:
    """The format of group, prompt_tokens, response_tokens [, sample, truncated, finish_reason,
    arrival_s, labels...]. Samples without an index are counted within their group.
    """

    def convert(rows: Iterable[Row], _: Counting) -> Placed:
        so_far: Counter[str] = Counter()
        for row in rows:
            name = row.text(group)
            index = row.whole(sample) if row.given(sample) else so_far[name]
            so_far[name] += 1
            yield _sample(row, name, index, row.labels(group, sample, *_REST))

    failed = without_tokens("prompt_tokens", "response_tokens")
    return Importer(about, frozenset({group, "prompt_tokens", "response_tokens"}), convert, failed)


def _sample(
    row: Row, group: str, index: int, labels: dict[str, str]
) -> tuple[SamplePlace, SampleRecord]:
    sample = SampleRecord(
        group=group,
        sample=index,
        prompt_tokens=row.tokens("prompt_tokens"),
        turns=(Turn(row.tokens("response_tokens")),),
        arrival_s=row.time("arrival_s") if row.given("arrival_s") else 0.0,
        finish=_finish(row),
        labels=labels,
    )
    return row.place, sample


def _finish(row: Row) -> Finish:
    if row.given("finish_reason"):
        return _FINISHES.get(row.text("finish_reason").lower(), "unknown")
    if not row.given("truncated"):
        return "unknown"
    flag = str(row.fields["truncated"]).strip().lower()
    if flag not in ("0", "1", "false", "true"):
        raise row.error("truncated", "expected 0 or 1")
    return "length" if flag in ("1", "true") else "stop"


GROUPED = _table("grouped CSV", "group_id", "sample_idx")
COUNTED = _table("lengths by group", "group", "sample")

#: What `--columns` may name in a table of a user's own, by the name here.
FIELDS = {
    "group": "group",
    "response": "response_tokens",
    "prompt": "prompt_tokens",
    "sample": "sample",
    "arrival": "arrival_s",
    "finish": "finish_reason",
}


# ------------------------------------------------------------------------------------------
# Answers of an OpenAI-compatible server, or only their `usage`.


def _usages(rows: Iterable[Row], _: Counting) -> Placed:
    """{"usage": {"prompt_tokens", "completion_tokens"} [, "prompt" or "messages" of the request,
    "choices", "created"]}, or a usage alone. Equal prompts are a group; a request without its
    prompt is a group of one.
    """
    names: dict[bytes, str] = {}
    members: Counter[str] = Counter()
    for serial, row in enumerate(rows):
        asked = next((row.fields[key] for key in ("prompt", "messages") if row.given(key)), None)
        key = blake2b(repr(serial if asked is None else asked).encode(), digest_size=16).digest()
        group = names.setdefault(key, f"prompt{len(names)}")
        index = members[group]
        members[group] += 1
        usage = _usage(row)
        choices = row.fields.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else row.fields
        yield (
            row.place,
            SampleRecord(
                group,
                index,
                usage.tokens("prompt_tokens"),
                (Turn(usage.tokens("completion_tokens")),),
                row.time("created") if row.given("created") else 0.0,
                _finish(Row(row.where, row.line, choice if isinstance(choice, dict) else {})),
            ),
        )


def _usage(row: Row) -> Row:
    usage = row.fields.get("usage", row.fields)
    return Row(row.where, row.line, usage if isinstance(usage, dict) else {})


ANSWERS = Importer(
    "answers with OpenAI usage",
    frozenset({"usage"}),
    _usages,
    lambda row: row.idle("usage") or _usage(row).idle("completion_tokens"),
)
USAGES = Importer(
    "OpenAI usage",
    frozenset({"prompt_tokens", "completion_tokens"}),
    _usages,
    without_tokens("prompt_tokens", "completion_tokens"),
)


# ------------------------------------------------------------------------------------------
# Serving traces without groups: each request is a group of one, with its arrival.


def _requests(
    about: str,
    arrival: str,
    prompt: str,
    output: str,
    labels: Callable[[Row], dict[str, str]] = lambda _: {},
) -> Importer:
    """The format of requests with these columns; `arrival` is in seconds."""

    def convert(rows: Iterable[Row], _: Counting) -> Placed:
        for serial, row in enumerate(rows):
            yield _ungrouped(row, serial, row.time(arrival), prompt, output, labels(row))

    failed = without_tokens(prompt, output)
    return Importer(about, frozenset({arrival, prompt, output}), convert, failed)


def _azure(rows: Iterable[Row], _: Counting) -> Placed:
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
        yield _ungrouped(row, serial, arrival_s, "ContextTokens", "GeneratedTokens", {})


def _ungrouped(
    row: Row, serial: int, arrival_s: float, prompt: str, output: str, labels: dict[str, str]
) -> tuple[SamplePlace, SampleRecord]:
    """A sample that is a group of its own, from a source without groups."""
    turns = (Turn(row.tokens(output)),)
    sample = SampleRecord(
        str(serial), 0, row.tokens(prompt), turns, arrival_s, "unknown", None, labels
    )
    return row.place, sample


_SERVING = ("t_s", "prompt_tokens", "response_tokens")
SERVING = _requests("serving CSV", *_SERVING, lambda row: row.labels(*_SERVING))
AZURE = Importer(
    "Azure LLM inference CSV",
    frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),
    _azure,
    without_tokens("ContextTokens", "GeneratedTokens"),
)
VIDUR = _requests("Vidur CSV", "arrived_at", "num_prefill_tokens", "num_decode_tokens")
#: Only its models and kinds of request are labels: sessions are too many.
BURSTGPT = _requests(
    "BurstGPT CSV",
    *("Timestamp", "Request tokens", "Response tokens"),
    lambda row: {name: row.text(name) for name in ("Model", "Log Type") if row.given(name)},
)


# ------------------------------------------------------------------------------------------
# Tables of quantiles, which cannot be replayed.


def _refuse(rows: Iterable[Row], _: Counting) -> Placed:
    """q, ...: quantiles of a distribution. Raises TraceError at the first row."""
    for row in rows:
        raise TraceError(
            row.where,
            "a table of quantiles (column 'q'), not of samples",
            "a replay needs one row per sample: record one",
            line=1,
        )
    return iter(())


QUANTILES = Importer("quantiles", frozenset({"q"}), _refuse, lambda _: False)

TABLES = (GROUPED, SERVING, COUNTED, AZURE, VIDUR, BURSTGPT, ANSWERS, USAGES)
