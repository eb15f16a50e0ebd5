"""Read recorded workloads from any known format, write them in ours, list the shipped ones.

The native format is described in docs/trace_format.md; foreign ones in `table_formats` and
`trajectory_formats`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import date, datetime
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from rollout_sched.simulators.traces.files import (
    Lines,
    TraceSource,
    numbered_lines,
    shipped_files,
    sources_of,
    stem,
    unpacked,
    write_lines,
)
from rollout_sched.simulators.traces.model import Counting, Gatherer, Trace, TraceError, brief
from rollout_sched.simulators.traces.native_format import (
    SCHEMA,
    TraceHeader,
    encoded_header,
    encoded_sample,
    native_header,
    native_samples,
)
from rollout_sched.simulators.traces.rows import Importer, Placed, Row, cells, csv_rows, json_rows
from rollout_sched.simulators.traces.table_formats import (
    AZURE,
    COUNTED,
    GROUPED,
    MOONCAKE,
    QUANTILES,
    SERVING,
    VIDUR,
)
from rollout_sched.simulators.traces.trajectory_formats import (
    AGENT_CALLS,
    REQUEST_LOG,
    SESSIONS,
    SHORT_KEYS,
    TPU_INFERENCE,
    VERL,
)

# ------------------------------------------------------------------------------------------
# Find the format of a foreign file by its columns.

#: The first whose columns are all present is used.
IMPORTERS: tuple[Importer, ...] = (
    GROUPED,
    SERVING,
    COUNTED,
    AZURE,
    VIDUR,
    MOONCAKE,
    SHORT_KEYS,
    TPU_INFERENCE,
    VERL,
    SESSIONS,
    REQUEST_LOG,
    AGENT_CALLS,
    QUANTILES,
)


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
    # The nearest: most columns present, and among equals the fewest missing.
    near = max(IMPORTERS, key=lambda i: (len(i.columns & present), -len(i.columns - present)))
    missing = ", ".join(sorted(near.columns - present))
    if near.columns & present:
        found = f"looks like {near.about}, but lacks: {missing}"
        raise TraceError(where, found, "add the missing columns", line=line, field=missing)
    known = "; ".join(f"{i.about} ({', '.join(sorted(i.columns))})" for i in IMPORTERS)
    shown = ", ".join(brief(repr(column)) for column in columns[:8])
    raise TraceError(
        where,
        f"no known trace format begins with {shown}",
        f"write {SCHEMA!r} (docs/trace_format.md) or one of: {known}",
        line=line,
    )


# ------------------------------------------------------------------------------------------
# Rows of Parquet files, as published data sets have them. Needs the extra `parquet`.

MAGIC = b"PAR1"

#: Rows in memory at once; those of a rollout dump are long texts.
AT_ONCE = 256


def parquet_rows(where: str, file: IO[bytes]) -> tuple[list[str], Iterator[Row]]:
    """(columns, rows counted from 1). Raises TraceError if it cannot be read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        remedy = "pip install 'rollout-sched[parquet]', or write it as JSON lines first"
        raise TraceError(where, "a Parquet file", remedy) from error
    # False metadata is only detected where it is used.
    damage = (pyarrow.ArrowException, OSError, ValueError, OverflowError)
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = list(table.schema_arrow.names)
    except damage as error:
        raise _damaged(where, error) from error

    def rows() -> Iterator[Row]:
        line = 0
        try:
            for batch in table.iter_batches(AT_ONCE):
                for fields in batch.to_pylist():
                    line += 1
                    yield Row(where, line, {key: _plain(value) for key, value in fields.items()})
        except damage as error:
            raise _damaged(where, error) from error

    return columns, rows()


def _damaged(where: str, error: Exception) -> TraceError:
    return TraceError(where, f"damaged Parquet ({error})", "copy the file again")


def _plain(value: Any) -> Any:
    """The value as JSON would have it."""
    return value.isoformat() if isinstance(value, datetime | date) else value


T = TypeVar("T")


class _Native(NamedTuple):
    where: str
    header: TraceHeader
    samples: Placed


class _Foreign(NamedTuple):
    where: str
    importer: Importer
    rows: Iterator[Row]


def read(source: str | os.PathLike[str], counting: Counting | None = None) -> Trace:
    """The trace in a file, in the files of a folder or a pattern, in standard input (`-`), or the
    shipped trace of that name; a file of that name takes precedence.

    The format is detected by content, not by the file's name, and must be the same in all files of
    a trace. counting: how to count tokens if the source does not (default: 3.3 characters per
    token, recorded in the labels). Raises TraceError, before any sample is used, with the file,
    line, field, finding and remedy.
    """
    name, sources = sources_of(source)
    files = map(_looked_at, sources)
    first = next(files)
    if isinstance(first, _Native):
        return _native(name, first, files)
    return _imported(name, first, files, counting or Counting())


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
            header = native_header(str(path), *next(numbered_lines(str(path), file)))
        listing[stem(path)] = header.about if header else ""
    return listing


def _looked_at(source: TraceSource) -> _Native | _Foreign:
    """A file with the format of its beginning; it is closed when it has been read."""
    with ExitStack() as stack:
        file = stack.enter_context(unpacked(source))
        content = _content(source.where, file)
        open_file = stack.pop_all()
    if isinstance(content, _Native):
        return content._replace(samples=_held(open_file, content.samples))
    return content._replace(rows=_held(open_file, content.rows))


def _held(open_file: ExitStack, items: Iterator[T]) -> Iterator[T]:
    with open_file:
        yield from items


def _content(where: str, file: IO[bytes]) -> _Native | _Foreign:
    magic = file.read(len(MAGIC))
    file.seek(0)
    if magic == MAGIC:
        columns, rows = parquet_rows(where, file)
        return _Foreign(where, recognised(where, 1, columns), rows)
    lines = numbered_lines(where, file)
    first = next(lines, None)
    if first is None:
        raise TraceError(where, "the file is empty", "record or convert the trace again")
    header = native_header(where, *first)
    if header is not None:
        return _Native(where, header, native_samples(where, lines))
    return _of_rows(where, *first, lines)


def _of_rows(where: str, number: int, text: str, lines: Lines) -> _Foreign:
    """A foreign file that has this first line."""
    if text.lstrip().startswith(("{", "[")):
        rows = json_rows(where, chain([(number, text)], lines))
        first = next(rows)
        importer = recognised(where, number, first.fields)
        return _Foreign(where, importer, chain([first], rows))
    header = [name.strip() for name in cells(where, number, text)]
    return _Foreign(where, recognised(where, number, header), csv_rows(where, header, lines))


def _native(name: str, first: _Native, others: Iterable[_Native | _Foreign]) -> Trace:
    headers = [first.header]

    def samples() -> Placed:
        yield from first.samples
        for other in others:
            if not isinstance(other, _Native):
                raise _mixed(other.where, other.importer.about, first.where, "native")
            headers.append(other.header)
            yield from other.samples

    groups = _gathered(first.where, samples())
    caps = [header.max_response_tokens for header in headers]
    known = [cap for cap in caps if cap is not None]
    return Trace(
        name=first.header.name or name,
        groups=groups.groups(),
        about=first.header.about,
        source=first.header.source,
        license=first.header.license,
        max_response_tokens=max(known) if len(known) == len(caps) else None,
    )


def _imported(
    name: str, first: _Foreign, others: Iterable[_Native | _Foreign], counting: Counting
) -> Trace:
    importer = first.importer

    def rows() -> Iterator[Row]:
        yield from first.rows
        for other in others:
            about = "native" if isinstance(other, _Native) else other.importer.about
            if isinstance(other, _Native) or other.importer is not importer:
                raise _mixed(other.where, about, first.where, importer.about)
            yield from other.rows

    groups = _gathered(first.where, importer.convert(rows(), counting))
    return Trace(name=name, groups=groups.groups(), about=importer.about)


def _mixed(where: str, about: str, first: str, first_about: str) -> TraceError:
    return TraceError(
        where,
        f"{about}, where {first} is {first_about}",
        "a trace has one format: name the files of one format by a pattern",
        line=1,
    )


def _gathered(where: str, samples: Placed) -> Gatherer:
    gatherer = Gatherer(where)
    for place, sample in samples:
        gatherer.add(sample, place)
    return gatherer
