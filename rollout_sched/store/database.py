"""The rows of a store, in SQLite: facts, and the place of each piece of tokens.

Every row has its own checksum, because SQLite has none: a flipped byte in a value would be read as
if it were correct.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rollout_sched.store.disk import Disk
from rollout_sched.store.token_files import PiecePlace
from rollout_sched.store.transaction import FactKey

#: Format of rows and tokens. This version cannot read any other number.
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


#: Most characters that are shown of a damaged row.
MOST_SHOWN = 80

Row = TypeVar("Row")


class FactRow(NamedTuple):
    """A row of facts."""

    kind: str
    name: str
    value: bytes


class PieceRow(NamedTuple):
    """A row of pieces: the place of the piece, and the checksum of its bytes."""

    owner: str
    ordinal: int
    place: PiecePlace
    crc: int


class Database:
    """One connection. Several threads may use it, but never two at once. Every call may raise
    sqlite3.Error.

    A `synced` commit survives a power loss, and so do all commits before it. Other commits survive
    the death of the process.
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
        # No other process opens the file, so the index of the write-ahead log can be in memory.
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
        """0 for a new database."""
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def problem(self) -> str:
        """The first problem of its pages; "" if there is none."""
        found = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        return "" if found == "ok" else str(found)

    def check_tables(self) -> None:
        """Check that the tables exist and can be read at their beginning."""
        for table in ("facts", "pieces"):
            self._db.execute(f"SELECT id FROM {table} WHERE id = 0").fetchall()

    def rows(self, select: str) -> Iterable[tuple[Any, ...]]:
        """The raw rows of FACTS or PIECES."""
        return self._db.execute(select)

    def facts(self) -> tuple[list[FactRow], dict[int, str]]:
        """The intact facts; and the ids of damaged rows, each with its apparent key."""
        return _sorted_out(self._db.execute(FACTS), fact_of)

    def pieces(self) -> tuple[list[PieceRow], dict[int, str]]:
        """The same for pieces; readers must check the tokens themselves."""
        return _sorted_out(self._db.execute(PIECES), piece_of)

    def write(self, change: Write, *, synced: bool | None) -> None:
        """Write all or nothing. `synced` None: after a power loss not even the order is kept."""
        level = "OFF" if synced is None else "FULL" if synced else "NORMAL"
        self._db.execute(f"PRAGMA synchronous = {level}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            before = self._db.total_changes
            change.carry_out(self._db)
            if synced and self._db.total_changes == before:
                # SQLite syncs nothing for a transaction that writes nothing, not even earlier ones.
                self._db.execute(f"PRAGMA user_version = {FORMAT}")
            self._disk.commit(self._db)
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def log_bytes(self) -> int:
        """Size of the write-ahead log."""
        log = Path(f"{self._path}-wal")
        return log.stat().st_size if log.exists() else 0

    def checkpoint(self) -> None:
        self._disk.checkpoint(self._db)

    def close(self) -> None:
        self._db.close()


class _Connection(sqlite3.Connection):
    """SQLite's messages quote damaged data, which Python may be unable to decode."""

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
        """Drop damaged rows, which are known only by their ids."""
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
    """The fact of a row of FACTS; None if the row is damaged."""
    _, kind, name, value, crc = row
    if not (isinstance(kind, str) and isinstance(name, str) and isinstance(value, bytes)):
        return None
    fact = FactRow(kind, name, value)
    return fact if _crc_of_fact(fact) == crc else None


def piece_of(row: tuple[Any, ...]) -> PieceRow | None:
    """The piece of a row of PIECES; None if the row is damaged."""
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
    """The apparent key of a damaged row, for messages."""
    return " ".join(str(field)[:MOST_SHOWN] for field in row[1:3])


def _crc_of_fact(fact: FactRow) -> int:
    return zlib.crc32(fact.value, zlib.crc32(f"{fact.kind}\0{fact.name}\0".encode()))


def _crc_of_row(row: tuple[Any, ...]) -> int:
    return zlib.crc32(repr(row).encode("utf-8", "replace"))


def _text(data: bytes) -> str:
    """Decode any bytes: the checksum detects damaged names, so decoding must not fail on them."""
    return data.decode("utf-8", "replace")
