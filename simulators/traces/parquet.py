"""Rows of Parquet files, as published data sets have them. Needs the extra `parquet`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime
from typing import IO, Any

from rollout_sched.simulators.traces.model import TraceError
from rollout_sched.simulators.traces.rows import Row

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
