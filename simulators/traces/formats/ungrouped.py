"""Serving traces without groups: each request is a group of one, with its arrival."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from rollout_sched.simulators.traces.model import Counting, SamplePlace, SampleRecord, Turn
from rollout_sched.simulators.traces.rows import Importer, Placed, Row


def _serving(rows: Iterable[Row], _: Counting) -> Placed:
    """t_s, prompt_tokens, response_tokens [, labels...]: a serving trace without groups."""
    for serial, row in enumerate(rows):
        arrival_s = row.seconds("t_s")
        labels = row.labels("t_s", "prompt_tokens", "response_tokens")
        yield _ungrouped(row, serial, arrival_s, "prompt_tokens", "response_tokens", labels)


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
        if arrival_s < 0:
            raise row.error("TIMESTAMP", "sort the rows by time")
        yield _ungrouped(row, serial, arrival_s, "ContextTokens", "GeneratedTokens")


def _vidur(rows: Iterable[Row], _: Counting) -> Placed:
    """arrived_at (seconds), num_prefill_tokens, num_decode_tokens: Vidur's columns."""
    for serial, row in enumerate(rows):
        arrival_s = row.seconds("arrived_at")
        yield _ungrouped(row, serial, arrival_s, "num_prefill_tokens", "num_decode_tokens")


def _mooncake(rows: Iterable[Row], _: Counting) -> Placed:
    """timestamp (ms), input_length, output_length [, hash_ids]: Mooncake's records.

    The block hashes are left out: they describe sharing between requests, not lengths.
    """
    for serial, row in enumerate(rows):
        arrival_s = row.seconds("timestamp") / 1000
        yield _ungrouped(row, serial, arrival_s, "input_length", "output_length")


def _ungrouped(
    row: Row,
    serial: int,
    arrival_s: float,
    prompt: str,
    output: str,
    labels: dict[str, str] | None = None,
) -> tuple[SamplePlace, SampleRecord]:
    """A sample that is a group of its own, from a source without groups."""
    turns = (Turn(row.tokens(output)),)
    sample = SampleRecord(
        str(serial), 0, row.tokens(prompt), turns, arrival_s, "unknown", None, labels or {}
    )
    return row.place, sample


SERVING = Importer("serving CSV", frozenset({"t_s", "prompt_tokens", "response_tokens"}), _serving)
AZURE = Importer(
    "Azure LLM inference CSV",
    frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),
    _azure,
)
VIDUR = Importer(
    "Vidur CSV", frozenset({"arrived_at", "num_prefill_tokens", "num_decode_tokens"}), _vidur
)
MOONCAKE = Importer(
    "Mooncake JSONL", frozenset({"timestamp", "input_length", "output_length"}), _mooncake
)
