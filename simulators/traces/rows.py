"""Rows of foreign trace files, CSV or JSON lines; numbers are checked when they are read."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from rollout_sched.simulators.traces.files import LONGEST_LINE, Lines
from rollout_sched.simulators.traces.model import (
    MAX_TOKENS,
    UNIX_S,
    Counting,
    SamplePlace,
    SampleRecord,
    TraceError,
    brief,
)
from rollout_sched.simulators.traces.native_format import decoded_json

# The limit is one for all readers of the process. Its default of 128 KiB is less than texts have.
csv.field_size_limit(LONGEST_LINE)


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

    def given(self, field: str) -> bool:
        """Whether an optional field has a value: it is not missing, null or empty."""
        return self.fields.get(field) not in (None, "")

    def idle(self, field: str) -> bool:
        """Whether the field says that nothing was generated: 0, null or empty, but not missing."""
        return field in self.fields and (not self.given(field) or _number(self.fields[field]) == 0)

    def promptless(self, field: str) -> bool:
        """Whether a prompt has 0 tokens. One without a count is an error where it is read."""
        return self.given(field) and self.idle(field)

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

    def milliseconds(self, field: str) -> float:
        """A duration in milliseconds."""
        return self.checked_seconds(field, self.fields.get(field), "milliseconds", 1e3 * UNIX_S)

    def seconds(self, field: str) -> float:
        """A duration."""
        return self.checked_seconds(field, self.fields.get(field))

    def time(self, field: str, per_s: int = 1) -> float:
        """A point in time in seconds, of a format with `per_s` units in a second.

        A Unix time shows its own unit by its size (ms, us or ns), whatever the format's is.
        """
        unit = "milliseconds" if per_s == 1000 else "seconds"
        value = self.checked_seconds(field, self.fields.get(field), unit, math.inf)
        units = (per for per in (10**9, 10**6, 10**3) if value >= UNIX_S / 10 * per)
        return value / next(units, per_s)

    def checked_whole(self, field: str, value: object, *, least: int) -> int:
        """An integer from the field, else TraceError: `3`, `"3"` and `3.0` are integers."""
        number = _number(value)
        if not (least <= number <= MAX_TOKENS and number % 1 == 0):
            raise self.error(field, f"expected a whole number from {least} to {MAX_TOKENS}")
        return int(number)

    def checked_seconds(
        self, field: str, value: object, unit: str = "seconds", below: float = UNIX_S
    ) -> float:
        """A time from the field, else TraceError that names its unit."""
        seconds = _number(value)
        if not 0 <= seconds < below:
            limit = "finite" if below == math.inf else f"less than {below:g}"
            raise self.error(field, f"expected {unit}: a number of at least 0, and {limit}")
        return seconds

    def labels(self, *used: str) -> dict[str, str]:
        """The columns that the importer did not use, without empty ones."""
        return {k: str(v) for k, v in self.fields.items() if k not in used and v not in ("", None)}


def csv_records(where: str, lines: Lines) -> Iterator[tuple[int, list[str]]]:
    """(line where it begins, values) of every record of CSV that has a value. Its separator is the
    most frequent in the first line. Quoted values may have line breaks, so the lines are all lines
    with their ends. TraceError on wrong quotes."""
    number, text = next(lines)
    separator = max(",;\t|", key=text.count)
    # Strict, because a lenient reader takes the rest of a file for the value of an open quote.
    reader = csv.reader(
        chain([text], (text for _, text in lines)), strict=True, delimiter=separator
    )
    while True:
        line = number + reader.line_num
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            remedy = "check the quoting from this line on"
            raise TraceError(where, f"not CSV ({error})", remedy, line=line) from error
        if any(value.strip() for value in values):
            yield line, values


def csv_rows(
    where: str, header: list[str], records: Iterable[tuple[int, list[str]]]
) -> Iterator[Row]:
    """Rows under a CSV header; TraceError on the first with more or fewer values."""
    for line, values in records:
        if len(values) != len(header):
            raise TraceError(
                where,
                f"{len(values)} values under {len(header)} columns",
                "every row needs one value per column",
                line=line,
            )
        yield Row(where, line, dict(zip(header, values, strict=True)))


def json_rows(where: str, lines: Lines) -> Iterator[Row]:
    """Rows of a file with one JSON object per line; TraceError on the first other value.

    The NaN and Infinity of other writers are null, so that they matter only where they are read.
    """
    for line, text in lines:
        fields = decoded_json(where, line, text, finite=False)
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


#: Samples, each with its place for error messages; None for a request that is left out.
Placed = Iterator[tuple[SamplePlace, SampleRecord | None]]


class Importer(NamedTuple):
    """How a foreign format is recognised, and how its rows become samples. columns: the columns
    that identify a file of this format.

    convert: keeps lengths, counts and times, turns further columns into labels, and raises
        TraceError at the first row that it cannot use. Rows may be of several files, in order.
    failed: whether a row is of a request without tokens; convert does not see such rows.
    """

    about: str
    columns: frozenset[str]
    convert: Callable[[Iterable[Row], Counting], Placed]
    failed: Callable[[Row], bool]


def without_tokens(prompt: str, output: str) -> Callable[[Row], bool]:
    """`Importer.failed` of a format with these columns: no output, or a prompt of 0 tokens."""

    def failed(row: Row) -> bool:
        return row.idle(output) or row.promptless(prompt)

    return failed
