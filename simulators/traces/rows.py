"""Rows of foreign trace files, CSV or JSON lines; numbers are checked when they are read."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rollout_sched.simulators.traces.files import Lines
from rollout_sched.simulators.traces.model import (
    MAX_TOKENS,
    Counting,
    SamplePlace,
    SampleRecord,
    TraceError,
    brief,
)
from rollout_sched.simulators.traces.native_format import decoded_json


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a foreign file, with its place for error messages."""

    where: str
    line: int
    fields: dict[str, object]

    @property
    def place(self) -> SamplePlace:
        return SamplePlace(self.where, self.line)

    def error(self, field: str, remedy: str) -> TraceError:
        """The error for this field of the row, for the caller to raise."""
        found = f"found {brief(repr(self.fields[field]))}" if field in self.fields else "missing"
        return TraceError(self.where, found, remedy, line=self.line, field=field)

    def tokens(self, field: str) -> int:
        """A length: a whole number of tokens, at least 1."""
        return self.checked_whole(field, self.fields.get(field), least=1)

    def whole(self, field: str) -> int:
        """A whole number, at least 0."""
        return self.checked_whole(field, self.fields.get(field), least=0)

    def list_of(self, field: str) -> list[object]:
        """A list of values that are not checked yet."""
        value = self.fields.get(field)
        if not isinstance(value, list):
            raise self.error(field, "expected a list")
        return value

    def text(self, field: str) -> str:
        """A name or a text: a string, or a number written as one."""
        value = self.fields.get(field)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.error(field, "expected a text or a number")
        return str(value)

    def seconds(self, field: str) -> float:
        """A time, at least 0 and finite."""
        return self.checked_seconds(field, self.fields.get(field))

    def checked_whole(self, field: str, value: object, *, least: int) -> int:
        """An integer from the field, else TraceError: `3`, `"3"` and `3.0` are integers."""
        number = _number(value)
        if not (least <= number <= MAX_TOKENS and number % 1 == 0):
            raise self.error(field, f"expected a whole number from {least} to {MAX_TOKENS}")
        return int(number)

    def checked_seconds(self, field: str, value: object) -> float:
        """A time from the field, else TraceError."""
        seconds = _number(value)
        if not 0 <= seconds < math.inf:
            raise self.error(field, "expected seconds: a finite number, at least 0")
        return seconds

    def labels(self, *used: str) -> dict[str, str]:
        """The columns that the importer did not use, without empty ones."""
        return {k: str(v) for k, v in self.fields.items() if k not in used and v not in ("", None)}


def cells(where: str, line: int, text: str) -> list[str]:
    """The values in one line of CSV."""
    try:
        return next(csv.reader([text]))
    except csv.Error as error:
        raise TraceError(where, f"not CSV ({error})", "check the quoting", line=line) from error


def csv_rows(where: str, header: list[str], lines: Lines) -> Iterator[Row]:
    """Rows under a CSV header; TraceError on the first with more or fewer values."""
    for line, text in lines:
        values = cells(where, line, text)
        if len(values) != len(header):
            raise TraceError(
                where,
                f"{len(values)} values under {len(header)} columns",
                "every row needs one value per column",
                line=line,
            )
        yield Row(where, line, dict(zip(header, values, strict=True)))


def json_rows(where: str, lines: Lines) -> Iterator[Row]:
    """Rows of a file with one JSON object per line; TraceError on the first other value."""
    for line, text in lines:
        fields = decoded_json(where, line, text)
        if not isinstance(fields, dict):
            kind = type(fields).__name__
            raise TraceError(where, f"a JSON {kind}", "write one JSON object per line", line=line)
        yield Row(where, line, fields)


def _number(value: object) -> float:
    """The number in a cell or a JSON value; NaN, which fails every check, if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


#: Samples, each with its place for error messages.
Placed = Iterator[tuple[SamplePlace, SampleRecord]]


class Importer(NamedTuple):
    """How a foreign format is recognised, and how its rows become samples. columns: the columns
    that identify a file of this format.

    convert: keeps lengths, counts and times, turns further columns into labels, and raises
        TraceError at the first row that it cannot use. Rows may be of several files, in order.
    """

    about: str
    columns: frozenset[str]
    convert: Callable[[Iterable[Row], Counting], Placed]
