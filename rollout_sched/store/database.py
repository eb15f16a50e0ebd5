"""The rows of a store, in SQLite: facts, and where each piece of tokens lies.

Every row has a checksum of its own, for SQLite has none: a byte that flips in a value would be read
as if it were true.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rollout_sched.store.changes import FactKey
from rollout_sched.store.disk import Disk
from rollout_sched.store.token_files import PiecePlace

#: How rows and tokens are written. Another number cannot be read by this version.
FORMAT = 1

_TABLES = (
    "CREATE TABLE facts (id INTEGER PRIMARY KEY, kind TEXT, name TEXT, value BLOB, crc INTEGER, "
    "UNIQUE (kind, name))",
    "CREATE TABLE pieces (id INTEGER PRIMARY KEY, owner TEXT, ordinal INTEGER, file INTEGER, "
    "start INTEGER, length INTEGER, data_crc INTEGER, crc INTEGER, UNIQUE (owner, ordinal))",
)

FACTS = "SELECT id, kind, name, value, crc FROM facts"
PIECES = "SELECT id, owner, ordinal, file, start, length, data_crc, crc FROM pieces"

_PUT_FACT = """INSERT INTO facts (kind, name, value, crc) VALUES (?, ?, ?, ?)
ON CONFLICT (kind, name) DO UPDATE SET value = excluded.value, crc = excluded.crc"""
_PUT_PIECE = """INSERT INTO pieces (owner, ordinal, file, start, length, data_crc, crc)
VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (owner, ordinal) DO UPDATE SET file = excluded.file,
start = excluded.start, length = excluded.length, data_crc = excluded.data_crc, crc = excluded.crc
"""


#: Characters of what a damaged row says.
MOST_SHOWN = 80

Row = TypeVar("Row")


class FactRow(NamedTuple):
    """A row of facts."""

    kind: str
    name: str
    value: bytes


class PieceRow(NamedTuple):
    """A row of pieces: where it lies, and the checksum of what lies there."""

    owner: str
    ordinal: int
    place: PiecePlace
    crc: int


class Database:
    """One connection, whose thread may change but which two never use at once. Every call may raise
    sqlite3.Error.

    `synced` of a commit: it survives a loss of power, and so does all that came before. Others
    survive the death of the process.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._disk = disk
        self._path = path
        self._db = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, factory=_Connection
        )
        self._db.text_factory = _text
        try:
            self._set_up()
        except BaseException:
            self._db.close()
            raise

    def _set_up(self) -> None:
        # Nobody else opens it, so its index of the log can be kept in memory.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = WAL").fetchall()
        self._db.execute("PRAGMA wal_autocheckpoint = 0")
        self._db.execute("PRAGMA cell_size_check = ON")

    def begin_anew(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        for statement in _TABLES:
            self._db.execute(statement)
        self._db.execute(f"PRAGMA user_version = {FORMAT}")
        self._disk.commit(self._db)

    @property
    def format(self) -> int:
        """0 where nothing was ever written."""
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def problem(self) -> str:
        """What is wrong with its pages; "" if nothing is."""
        found = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        return "" if found == "ok" else str(found)

    def check_tables(self) -> None:
        """That they are there, and begin to be readable."""
        for table in ("facts", "pieces"):
            self._db.execute(f"SELECT id FROM {table} WHERE id = 0").fetchall()

    def rows(self, select: str) -> Iterable[tuple[Any, ...]]:
        """Of FACTS or PIECES, as they come."""
        return self._db.execute(select)

    def facts(self) -> tuple[list[FactRow], dict[int, str]]:
        """Those that are sound; and of the damaged rows the ids, with what they seem to be of."""
        return _sorted_out(self._db.execute(FACTS), fact_of)

    def pieces(self) -> tuple[list[PieceRow], dict[int, str]]:
        """The same of pieces; whether the tokens are sound is for who reads them."""
        return _sorted_out(self._db.execute(PIECES), piece_of)

    def write(self, change: Write, *, synced: bool | None) -> None:
        """All of it or nothing. `synced` None: not even in order, should the power fail."""
        level = "OFF" if synced is None else "FULL" if synced else "NORMAL"
        self._db.execute(f"PRAGMA synchronous = {level}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            before = self._db.total_changes
            change.carry_out(self._db)
            if synced and self._db.total_changes == before:
                # SQLite does not sync a transaction that writes nothing, nor what came before it.
                self._db.execute(f"PRAGMA user_version = {FORMAT}")
            self._disk.commit(self._db)
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def log_bytes(self) -> int:
        """Of the write-ahead log."""
        log = Path(f"{self._path}-wal")
        return log.stat().st_size if log.exists() else 0

    def checkpoint(self) -> None:
        self._disk.checkpoint(self._db)

    def close(self) -> None:
        self._db.close()


class _Connection(sqlite3.Connection):
    """SQLite's messages quote what is damaged, which Python may fail to read."""

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*statement)
        except UnicodeDecodeError as error:
            said = bytes(error.object).decode("utf-8", "replace")
            raise sqlite3.DatabaseError(said) from error


class Write:
    """The rows of one transaction."""

    def __init__(self) -> None:
        self._put_facts: list[tuple[Any, ...]] = []
        self._drop_facts: list[FactKey] = []
        self._put_pieces: list[tuple[Any, ...]] = []
        self._drop_pieces: list[tuple[str, int]] = []
        self._drop_rows: tuple[list[tuple[int]], list[tuple[int]]] = ([], [])

    def put_fact(self, fact: FactRow) -> None:
        self._put_facts.append((*fact, _crc_of_fact(fact)))

    def drop_fact(self, kind: str, name: str) -> None:
        self._drop_facts.append((kind, name))

    def put_pieces(self, pieces: Iterable[PieceRow]) -> None:
        rows = ((piece.owner, piece.ordinal, *piece.place, piece.crc) for piece in pieces)
        self._put_pieces += ((*row, _crc_of_row(row)) for row in rows)

    def drop_pieces(self, pieces: Iterable[PieceRow]) -> None:
        self._drop_pieces += ((piece.owner, piece.ordinal) for piece in pieces)

    def drop_rows(self, facts: Iterable[int], pieces: Iterable[int]) -> None:
        """Damaged ones, which only their ids name."""
        self._drop_rows = [(id,) for id in facts], [(id,) for id in pieces]

    def carry_out(self, database: sqlite3.Connection) -> None:
        run = database.executemany
        run("DELETE FROM facts WHERE id = ?", self._drop_rows[0])
        run("DELETE FROM pieces WHERE id = ?", self._drop_rows[1])
        run("DELETE FROM facts WHERE kind = ? AND name = ?", self._drop_facts)
        run(_PUT_FACT, self._put_facts)
        run("DELETE FROM pieces WHERE owner = ? AND ordinal = ?", self._drop_pieces)
        run(_PUT_PIECE, self._put_pieces)


def fact_of(row: tuple[Any, ...]) -> FactRow | None:
    """Of a row of FACTS; None if it is damaged."""
    _, kind, name, value, crc = row
    if not (isinstance(kind, str) and isinstance(name, str) and isinstance(value, bytes)):
        return None
    fact = FactRow(kind, name, value)
    return fact if _crc_of_fact(fact) == crc else None


def piece_of(row: tuple[Any, ...]) -> PieceRow | None:
    """Of a row of PIECES; None if it is damaged."""
    _, owner, ordinal, file, start, length, data_crc, crc = row
    if _crc_of_row((owner, ordinal, file, start, length, data_crc)) != crc:
        return None
    return PieceRow(owner, ordinal, PiecePlace(file, start, length), data_crc)


def _sorted_out(
    rows: Iterable[tuple[Any, ...]], read: Callable[[tuple[Any, ...]], Row | None]
) -> tuple[list[Row], dict[int, str]]:
    sound: list[Row] = []
    damaged: dict[int, str] = {}
    for row in rows:
        found = read(row)
        if found is None:
            damaged[row[0]] = seems_to_be(row)
        else:
            sound.append(found)
    return sound, damaged


def seems_to_be(row: tuple[Any, ...]) -> str:
    """What a damaged row says that it is of, for people."""
    return " ".join(str(field)[:MOST_SHOWN] for field in row[1:3])


def _crc_of_fact(fact: FactRow) -> int:
    return zlib.crc32(fact.value, zlib.crc32(f"{fact.kind}\0{fact.name}\0".encode()))


def _crc_of_row(row: tuple[Any, ...]) -> int:
    return zlib.crc32(repr(row).encode("utf-8", "replace"))


def _text(data: bytes) -> str:
    """Damaged names are told by their checksum, not by what cannot be decoded."""
    return data.decode("utf-8", "replace")
