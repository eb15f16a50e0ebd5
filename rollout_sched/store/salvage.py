"""Salvage: the intact content of a damaged store goes into a new database for the old tokens."""

from __future__ import annotations

import argparse
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from rollout_sched.store.database import FACTS, PIECES, Database, Row, Write, fact_of, piece_of
from rollout_sched.store.disk import Disk, StoreLock
from rollout_sched.store.errors import StoreError
from rollout_sched.store.store import ROWS, Losses, Store

#: Most ids to try if rows cannot be read, or if the last id is unknown.
_MOST = 2**14


class Salvaged(msgspec.Struct, frozen=True):
    """The number of intact rows, where the damaged ones are kept, and what else was damaged, as far
    as that is known."""

    facts: int
    pieces: int
    kept_as: Path
    losses: Losses


def salvage(folder: Path) -> Salvaged:
    """Make a store usable again with its intact content. The old database is kept beside it.

    Raises StoreError if it is in use, or nothing can be read.
    """
    rows = folder / ROWS
    if not rows.exists():
        raise StoreError(f"store {folder}: there is no {ROWS}; is this a store?")
    with closing(StoreLock(folder)):
        try:
            facts, pieces = _rows(rows, FACTS, fact_of), _rows(rows, PIECES, piece_of)
        except sqlite3.Error as error:
            raise StoreError(
                f"store {folder}: nothing of it can be read ({error}); move the folder away to "
                "start with a new store"
            ) from error
        new = folder / f"{ROWS}.new"
        _clear_away(new)
        write = Write()
        for fact in facts:
            write.put_fact(fact)
        write.put_pieces(pieces)
        with closing(Database(new, Disk())) as database:
            database.begin_anew()
            database.write(write, synced=True)
            database.checkpoint()
        kept = _keep_the_old(rows)
        _clear_away(new, but=new)
        new.rename(rows)
    with closing(Store(folder)) as store:
        return Salvaged(len(facts), len(pieces), kept, store.losses)


def _rows(path: Path, select: str, read: Callable[[tuple[Any, ...]], Row | None]) -> list[Row]:
    """The intact rows, in ascending order of id. Raises sqlite3.Error if there is no such table."""
    with closing(Database(path, Disk())) as database:
        database.check_tables()
        found = (read(row) for row in _readable(database, select))
        return [row for row in found if row is not None]


def _readable(database: Database, select: str) -> Iterator[tuple[Any, ...]]:
    """Row by row. If a page cannot be read, or leads back to an earlier row, it continues from the
    next readable id."""
    last, end, tries = 0, _last_id(database, select), 0
    while last < end and tries < _MOST:
        try:
            for row in database.rows(f"{select} WHERE id > {last} ORDER BY id"):
                if row[0] <= last:
                    raise sqlite3.DatabaseError(f"row {row[0]} comes after row {last}")
                last = row[0]
                yield row
            return
        except sqlite3.Error:
            last, tries = last + 1, tries + 1


def _last_id(database: Database, select: str) -> int:
    try:
        return next((row[0] for row in database.rows(f"{select} ORDER BY id DESC LIMIT 1")), 0)
    except sqlite3.Error:
        return _MOST


def _keep_the_old(rows: Path) -> Path:
    number = 1
    while (kept := rows.with_name(f"{rows.name}.damaged-{number}")).exists():
        number += 1
    for path in _files(rows):
        if path.exists():
            path.rename(str(path).replace(str(rows), str(kept)))
    return kept


def _clear_away(rows: Path, *, but: Path | None = None) -> None:
    for path in _files(rows):
        if path != but:
            path.unlink(missing_ok=True)


def _files(rows: Path) -> list[Path]:
    """The database and SQLite's files beside it."""
    return [Path(f"{rows}{suffix}") for suffix in ("", "-wal", "-shm")]


# ------------------------------------------------------------------------------------------
# `rollout-sched store`: maintenance of a store that is not in use.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verb = verbs.add_parser("salvage", help="make a damaged store usable with its intact content")
    verb.add_argument("folder", metavar="DIR", type=Path)
    verb.set_defaults(run=_salvage)


def _salvage(options: argparse.Namespace) -> None:
    found = salvage(options.folder)
    print(f"{options.folder}: {found.facts} facts and {found.pieces} pieces of tokens are intact")
    for line in found.losses.told():
        print(line)
    print(f"unreadable content is lost; the old database is kept as {found.kept_as}")
