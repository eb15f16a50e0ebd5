"""Read recorded workloads from any known format, write them in ours, list the shipped ones.

The native format is described in docs/trace_format.md; foreign ones in `table_formats` and
`trajectory_formats`.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from datetime import date, datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollout_sched.process import install_extra
from rollout_sched.simulators.traces.files import (
    ROW_BYTES,
    TraceSource,
    Unpacked,
    filled,
    numbered_lines,
    shipped_files,
    sources_of,
    stem,
    unpacked,
    write_lines,
)
from rollout_sched.simulators.traces.model import (
    UNIX_S,
    Counting,
    Gatherer,
    SamplePlace,
    SampleRecord,
    Trace,
    TraceError,
    brief,
)
from rollout_sched.simulators.traces.native_format import (
    SCHEMA,
    TraceHeader,
    encoded_header,
    encoded_sample,
    native_header,
    native_samples,
)
from rollout_sched.simulators.traces.rows import (
    Importer,
    Row,
    csv_records,
    csv_rows,
    json_rows,
)
from rollout_sched.simulators.traces.table_formats import COUNTED, FIELDS, QUANTILES, TABLES
from rollout_sched.simulators.traces.trajectory_formats import TRAJECTORIES, UNKNOWN_PROMPT

# ------------------------------------------------------------------------------------------
# Find the format of a foreign file by its columns.

#: The first whose columns are all present is used.
IMPORTERS: tuple[Importer, ...] = (*TABLES, *TRAJECTORIES, QUANTILES)


def recognised(where: str, line: int, columns: Iterable[str]) -> Importer:
    """The importer whose columns are all present. Raises TraceError with the nearest if none."""
    columns = list(columns)
    present = set(columns)
    for importer in IMPORTERS:
        if importer.columns <= present:
            return importer
    if present >= {"group", "turns"}:
        found = "looks like a native trace without its header"
        remedy = f'write {{"schema":"{SCHEMA}"}} as the first line (docs/trace_format.md)'
        raise TraceError(where, found, remedy, line=line)
    # The nearest: the largest share of its columns is present, and among equals the most.
    near = max(
        IMPORTERS,
        key=lambda i: (len(i.columns & present) / len(i.columns), len(i.columns & present)),
    )
    missing = ", ".join(sorted(near.columns - present))
    if 2 * len(near.columns & present) > len(near.columns):
        found = f"looks like {near.about}, but lacks: {missing}"
        remedy = "add what is missing, or name your own columns by --columns group=...,response=..."
        raise TraceError(where, found, remedy, line=line, field=missing)
    known = "".join(f"\n  {i.about}: {', '.join(sorted(i.columns))}" for i in IMPORTERS)
    shown = ", ".join(brief(repr(column)) for column in columns[:8])
    raise TraceError(
        where,
        f"no known trace format begins with {shown}",
        f"name its columns by --columns group=...,response=..., or write {SCHEMA!r} "
        f"(docs/trace_format.md) or one of:{known}",
        line=line,
    )


# ------------------------------------------------------------------------------------------
# Rows of Parquet files, as published data sets have them. Needs the extra `parquet`.

MAGIC = b"PAR1"

#: Rows in memory at once; those of a rollout dump are long texts. One text may stand for all rows
#: of its part of the file, so fewer rows of large parts are read at once.
AT_ONCE = 256
_AT_ONCE_BYTES = 2**26


def parquet_rows(where: str, file: Unpacked) -> tuple[list[str], Iterator[Row]]:
    """(columns, rows counted from 1). Raises TraceError if it cannot be read, or has too much."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        remedy = f"{install_extra('parquet')}, or write it as JSON lines first"
        raise TraceError(where, "a Parquet file", remedy) from error
    # False metadata is only detected where it is used.
    damage = (pyarrow.ArrowException, OSError, ValueError, OverflowError)
    try:
        table = pyarrow.parquet.ParquetFile(file.stream)
        columns = list(table.schema_arrow.names)
        groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
        largest = max((group.total_byte_size for group in groups), default=0)
    except damage as error:
        raise _damaged(where, error) from error

    def rows() -> Iterator[Row]:
        line = found = 0
        try:
            for batch in table.iter_batches(max(1, min(AT_ONCE, _AT_ONCE_BYTES // (largest + 1)))):
                found += max(batch.nbytes, ROW_BYTES * batch.num_rows)
                file.check(where, found)
                for fields in batch.to_pylist():
                    line += 1
                    yield Row(where, line, {key: _plain(value) for key, value in fields.items()})
        except TraceError:
            raise
        except damage as error:
            raise _damaged(where, error) from error

    return columns, rows()


def _damaged(where: str, error: Exception) -> TraceError:
    return TraceError(where, f"damaged Parquet ({error})", "copy the file again")


def _plain(value: Any) -> Any:
    """The value as JSON would have it; NaN, which stands for a missing number, as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.isoformat() if isinstance(value, datetime | date) else value


class _File(NamedTuple):
    """A file of a trace. A native one has no importer, and its rows are samples with their
    places."""

    where: str
    importer: Importer | None
    header: TraceHeader
    rows: Iterator[Any]

    @property
    def about(self) -> str:
        return "native" if self.importer is None else self.importer.about


def read(
    source: str | os.PathLike[str],
    counting: Counting | None = None,
    columns: Mapping[str, str] | None = None,
) -> Trace:
    """The trace in a file, in the files of a folder or a pattern, in standard input (`-`), or the
    shipped trace of that name; a file of that name takes precedence.

    The format is detected by content, not by the file's name, and must be the same in all files of
    a trace. Arrivals of foreign formats are counted from the earliest, which is also the order of
    their groups. counting: how to count tokens if the source does not (default: 3.3 characters per
    token, recorded in the labels). columns: in a table of a user's own, the names of FIELDS.
    Raises TraceError, before any sample is used, with the file, line, field, finding and remedy.
    """
    name, sources = sources_of(source)
    files = (_looked_at(one, columns or {}) for one in sources)
    first = next(files)
    headers = [first.header]

    def rows() -> Iterator[Any]:
        yield from first.rows
        for other in files:
            if other.importer is not first.importer:
                raise TraceError(
                    other.where,
                    f"{other.about}, where {first.where} is {first.about}",
                    "a trace has one format: name the files of one format by a pattern",
                    line=1,
                )
            headers.append(other.header)
            yield from other.rows

    gatherer = Gatherer(first.where)
    samples = rows()
    if first.importer is not None:
        with_tokens = _with_tokens(samples, first.importer, gatherer)
        samples = first.importer.convert(with_tokens, counting or Counting())
    groups = _gathered(samples, gatherer, foreign=first.importer is not None)
    caps = [header.max_response_tokens for header in headers]
    known = [cap for cap in caps if cap is not None]
    return Trace(
        name=first.header.name or name,
        groups=groups,
        about=first.header.about,
        source=first.header.source,
        license=first.header.license,
        max_response_tokens=max(known) if len(known) == len(caps) else None,
        prompts_per_step=first.header.prompts_per_step or _groups_of_a_step(groups),
        samples_per_prompt=first.header.samples_per_prompt,
        left_out=gatherer.left_out,
    )


def _with_tokens(rows: Iterable[Row], importer: Importer, gatherer: Gatherer) -> Iterator[Row]:
    """The rows without those of failed requests, which are counted."""
    for row in rows:
        if importer.failed(row):
            gatherer.left_out += 1
        else:
            yield row


def _gathered(
    samples: Iterable[tuple[SamplePlace, SampleRecord | None]], gatherer: Gatherer, *, foreign: bool
) -> dict[str, list[SampleRecord]]:
    """The groups. Arrivals on another clock are counted from the earliest: those of foreign
    formats, and Unix times. TraceError if times are of two clocks."""
    latest, last = -math.inf, SamplePlace("", None)
    for place, sample in samples:
        if sample is None:
            gatherer.left_out += 1
            continue
        gatherer.add(sample, place)
        longest = max([turn.tool_s for turn in sample.turns])
        if longest >= UNIX_S:
            raise _of_two_clocks(f"{longest:g} s between turns of a sample", place)
        if sample.arrival_s > latest:
            latest, last = sample.arrival_s, place
    groups = gatherer.groups()
    first = {name: min(sample.arrival_s for sample in of) for name, of in groups.items()}
    start = min(first.values())
    if latest - start >= UNIX_S:
        raise _of_two_clocks(f"a sample that arrives {latest - start:g} s after the first", last)
    if start and (foreign or start >= UNIX_S):
        for sample in chain.from_iterable(groups.values()):
            msgspec.structs.force_setattr(sample, "arrival_s", sample.arrival_s - start)
    if not foreign:
        return groups
    return {name: groups[name] for name in sorted(groups, key=first.__getitem__)}


def _of_two_clocks(found: str, place: SamplePlace) -> TraceError:
    return TraceError(place.where, found, "give all times by one clock", line=place.line)


def _groups_of_a_step(groups: Mapping[str, list[SampleRecord]]) -> int | None:
    """The most common number, if a label says of which step each group is, as verl's does; the
    larger on a tie."""
    steps = Counter(members[0].labels.get("step") for members in groups.values())
    sizes = Counter(steps.values())
    return None if None in steps else max(sizes, key=lambda size: (sizes[size], size))


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace in the native format, gzip if the name ends in .gz.

    The write is atomic; equal traces give equal bytes. Raises TraceError if a sample would not be
    readable again (a zero length, a NaN time), OSError from the file system.
    """
    where = f"trace {trace.name!r}"
    samples = (encoded_sample(where, sample) for sample in trace.samples())
    write_lines(Path(path), chain([encoded_header(trace)], samples))


def shipped() -> dict[str, str]:
    """Name -> one-line description of every shipped trace."""
    listing = {}
    for path in shipped_files():
        (source,) = sources_of(path).files
        with unpacked(source) as file:
            header = native_header(str(path), *next(filled(numbered_lines(str(path), file))))
        listing[stem(path)] = header.about if header else ""
    return listing


def _looked_at(source: TraceSource, named: Mapping[str, str]) -> _File:
    """A file with the format of its beginning; it is closed when it has been read."""
    with ExitStack() as stack:
        file = _content(source.where, stack.enter_context(unpacked(source)), named)
        return file._replace(rows=_held(stack.pop_all(), file.rows))


def _held(open_file: ExitStack, rows: Iterator[Any]) -> Iterator[Any]:
    with open_file:
        yield from rows


def _content(where: str, file: Unpacked, named: Mapping[str, str]) -> _File:
    magic = file.stream.read(len(MAGIC))
    file.stream.seek(0)
    if magic == MAGIC:
        columns, rows = parquet_rows(where, file)
        return _foreign(where, 1, columns, rows, named)
    lines = numbered_lines(where, file)
    first = next((line for line in lines if line[1].strip()), None)
    if first is None:
        raise TraceError(where, "the file is empty", "record or convert the trace again")
    header = native_header(where, *first)
    if header is not None:
        return _File(where, None, header, native_samples(where, filled(lines)))
    number, text = first
    lines = chain([first], lines)
    if text.lstrip().startswith(("{", "[")):
        rows = json_rows(where, filled(lines))
        row = next(rows)
        return _foreign(where, number, row.fields, chain([row], rows), named)
    records = csv_records(where, lines)
    _, names = next(records, (number, []))
    columns = [name.strip() for name in names]
    return _foreign(where, number, columns, csv_rows(where, columns, records), named)


def _foreign(
    where: str, number: int, columns: Iterable[str], rows: Iterator[Row], named: Mapping[str, str]
) -> _File:
    importer = COUNTED if named else recognised(where, number, columns)
    if named:
        rows = _renamed(where, number, list(columns), rows, named)
    return _File(where, importer, TraceHeader(SCHEMA, about=importer.about), rows)


def _renamed(
    where: str, number: int, columns: list[str], rows: Iterator[Row], named: Mapping[str, str]
) -> Iterator[Row]:
    """The rows with the names of FIELDS. A table without lengths of prompts gets those of 1."""
    for field, column in named.items():
        if field not in FIELDS:
            raise TraceError(where, f"--columns {field}=", f"name one of {', '.join(FIELDS)}")
        if column not in columns:
            found = f"no column {brief(repr(column))}; it has {', '.join(map(brief, columns))}"
            raise TraceError(where, found, f"name that of {field} by --columns", line=number)
    if missing := {"group", "response"} - named.keys():
        raise TraceError(where, "--columns", f"name that of {' and '.join(sorted(missing))}, too")
    ours = {column: FIELDS[field] for field, column in named.items()}

    def renamed(row: Row) -> Row:
        fields = {ours.get(column, column): value for column, value in row.fields.items()}
        return Row(row.where, row.line, {"prompt_tokens": UNKNOWN_PROMPT, **fields})

    return map(renamed, rows)
