"""The tables of a store, in one SQLite database: facts, and pieces of tokens by owner.

Every row has a checksum, because SQLite has none outside of its log: a flipped byte in a value
would be read as if it were correct. Its keys need none: they are in an index too, and SQLite checks
that table and index agree.

The log is written in order and synced as a whole, and a page is changed only after it was synced,
so what is read after a loss of power is the content after some transaction, and after the last
synced one or a later one.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from rollout_sched.store.disk import Disk
from rollout_sched.store.errors import PieceDamaged
from rollout_sched.store.transaction import Transaction

#: Format of rows and tokens. This version cannot read any other number.
FORMAT = 2

#: Bytes of a page. A transaction writes each page that it touches as a whole, so small ones want
#: small pages and tokens large ones: with 4 KiB samples of 51 KB take 1.6 times the CPU, with 64
#: KiB no less than with 16.
PAGE = 2**14

#: Pages of the log after which it is copied into the database and begun again. Space that is
#: written, freed and written again in the meantime is copied once.
LOG_PAGES = 2**25 // PAGE

_SETTINGS = (
    f"PRAGMA page_size = {PAGE}",
    # A page can be moved to the place of a free one, so that the file can become smaller.
    "PRAGMA auto_vacuum = INCREMENTAL",
    "PRAGMA journal_mode = WAL",
    f"PRAGMA wal_autocheckpoint = {LOG_PAGES}",
    # Debian's SQLite else writes zeros over all that is deleted.
    "PRAGMA secure_delete = OFF",
    "PRAGMA cache_size = -16384",
    "PRAGMA cell_size_check = ON",
)

_TABLES = (
    "CREATE TABLE facts (id INTEGER PRIMARY KEY, kind TEXT, name TEXT, value BLOB, crc INTEGER, "
    "UNIQUE (kind, name))",
    "CREATE TABLE pieces (id INTEGER PRIMARY KEY, owner TEXT, ordinal INTEGER, crc INTEGER, "
    "data BLOB, UNIQUE (owner, ordinal))",
)

_PUT_FACT = """INSERT INTO facts (kind, name, value, crc) VALUES (?, ?, ?, ?)
ON CONFLICT (kind, name) DO UPDATE SET value = excluded.value, crc = excluded.crc"""
_PUT_PIECE = """INSERT INTO pieces (owner, ordinal, crc, data) VALUES (?, ?, ?, ?)
ON CONFLICT (owner, ordinal) DO UPDATE SET crc = excluded.crc, data = excluded.data"""

#: Most characters that are shown of a damaged row.
_MAX_SHOWN = 80


class FactRow(NamedTuple):
    """A row of facts."""

    kind: str
    name: str
    value: bytes


class Damaged(NamedTuple):
    """Ids of damaged rows, each with its key."""

    facts: dict[int, str]
    pieces: dict[int, str]


class Database:
    """One thread writes, and any thread may read pieces, for which it never waits for a write.
    Every call may raise sqlite3.Error.

    A `synced` write survives a power loss, and so do all writes before it. Other writes survive the
    death of the process.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._disk = disk
        self._sizes: dict[str, dict[int, int]] = {}  # of the pieces, by owner and ordinal
        self.live_bytes = 0
        self._reading = Lock()
        with _closed_on_error(_connected(path)) as self._db:
            for setting in _SETTINGS:
                self._db.execute(setting).fetchall()
            self._reader = _connected(path)

    # -- opening ---------------------------------------------------------------------------

    def begin_anew(self) -> None:
        with self._transaction():
            for statement in _TABLES:
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {FORMAT}")

    @property
    def format(self) -> int:
        """0 for a new database."""
        return self._number("user_version")

    def problem(self) -> str:
        """The first problem of its pages; "" if there is none."""
        found = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        return "" if found == "ok" else str(found).removeprefix("*** in database main ***\n")

    def load(self) -> tuple[list[FactRow], Damaged]:
        """The intact facts, and what is damaged, which `drop` must remove. All tokens are read."""
        damaged = Damaged({}, {})
        facts = []
        for id, kind, name, value, crc in self._db.execute("SELECT * FROM facts"):
            fact = FactRow(kind, name, value)
            if isinstance(value, bytes) and _crc_of_fact(fact) == crc:
                facts.append(fact)
            else:
                damaged.facts[id] = f"{kind} {name}"[:_MAX_SHOWN]
        for id, owner, ordinal, crc, data in self._db.execute("SELECT * FROM pieces"):
            if isinstance(data, bytes) and _crc_of_piece(owner, ordinal, data) == crc:
                self._resize(owner, ordinal, len(data))
            else:
                damaged.pieces[id] = owner
        return facts, damaged

    def drop(self, damaged: Damaged) -> None:
        """Remove damaged rows, which are known by their ids."""
        with self._transaction():
            for table, ids in (("facts", damaged.facts), ("pieces", damaged.pieces)):
                self._db.executemany(f"DELETE FROM {table} WHERE id = ?", [(id,) for id in ids])

    # -- reading ---------------------------------------------------------------------------

    def owners(self) -> list[str]:
        return list(self._sizes)

    def pieces(self, owner: str) -> dict[int, bytes]:
        """The pieces of an owner by ordinal, ascending. Raises PieceDamaged."""
        found = {}
        for ordinal, crc, data in self._read("ordinal, crc, data", owner):
            if _crc_of_piece(owner, ordinal, data) != crc:
                raise PieceDamaged(f"piece {ordinal} of {owner!r} has a wrong checksum")
            found[ordinal] = data
        return found

    def heads(self, owner: str, length: int) -> dict[int, bytes]:
        """The first bytes of each piece, unchecked. Raises PieceDamaged."""
        return dict(self._read(f"ordinal, substr(data, 1, {length})", owner))

    def _read(self, columns: str, owner: str) -> list[tuple[Any, ...]]:
        select = f"SELECT {columns} FROM pieces WHERE owner = ? ORDER BY ordinal"
        try:
            with self._reading:
                return self._reader.execute(select, (owner,)).fetchall()
        except sqlite3.DatabaseError as error:
            raise PieceDamaged(f"pieces of {owner!r}: {error}") from error

    # -- writing ---------------------------------------------------------------------------

    def write(self, changes: Transaction, *, synced: bool | None) -> None:
        """Write all or nothing. `synced` None: a power loss may damage the database."""
        written = list(changes.written())
        with self._transaction(synced=synced):
            before = self._db.total_changes
            self._write_facts(changes)
            self._write_pieces(changes, written)
            if synced and self._db.total_changes == before:
                # SQLite syncs nothing for a transaction that writes nothing, not even earlier ones.
                self._db.execute(f"PRAGMA user_version = {FORMAT}")
        for owner in changes.cleared:
            self.live_bytes -= sum(self._sizes.pop(owner, {}).values())
        for owner, ordinal in changes.taken_back():
            self._resize(owner, ordinal, None)
        for owner, ordinal, data in written:
            self._resize(owner, ordinal, len(data))

    def free_bytes(self) -> tuple[int, int]:
        """Bytes of unused pages, and of those in use."""
        free = self._number("freelist_count")
        return PAGE * free, PAGE * (self._number("page_count") - free)

    def shrink(self, size: int) -> None:
        """Move pages from the end of the file to unused ones, to make it smaller by `size` bytes
        when the log is next copied into it."""
        with self._transaction(synced=False):
            for _ in range(size // PAGE):  # Python ends this statement after one page
                self._db.execute("PRAGMA incremental_vacuum(1)")

    def close(self, *, synced: bool = True) -> None:
        """With `synced`, first put everything into the file and on the disk."""
        try:
            self._reader.close()
            if synced:
                self._db.execute("PRAGMA synchronous = FULL")
                self._disk.checkpoint(self._db)
        finally:
            self._db.close()

    @contextmanager
    def _transaction(self, *, synced: bool | None = True) -> Iterator[None]:
        level = "OFF" if synced is None else "FULL" if synced else "NORMAL"
        self._db.execute(f"PRAGMA synchronous = {level}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._disk.commit(self._db)
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _write_facts(self, changes: Transaction) -> None:
        gone = [key for key, value in changes.facts.items() if value is None]
        self._db.executemany("DELETE FROM facts WHERE kind = ? AND name = ?", gone)
        facts = [FactRow(*key, value) for key, value in changes.facts.items() if value is not None]
        self._db.executemany(_PUT_FACT, [(*fact, _crc_of_fact(fact)) for fact in facts])

    def _write_pieces(self, changes: Transaction, written: list[tuple[str, int, bytes]]) -> None:
        run = self._db.executemany
        run("DELETE FROM pieces WHERE owner = ?", [(owner,) for owner in changes.cleared])
        run("DELETE FROM pieces WHERE owner = ? AND ordinal = ?", changes.taken_back())
        run(_PUT_PIECE, ((o, n, _crc_of_piece(o, n, data), data) for o, n, data in written))

    def _resize(self, owner: str, ordinal: int, size: int | None) -> None:
        """Note the size of a piece; None: it is gone."""
        sizes = self._sizes.setdefault(owner, {})
        self.live_bytes += (size or 0) - sizes.pop(ordinal, 0)
        if size is not None:
            sizes[ordinal] = size
        if not sizes:
            del self._sizes[owner]

    def _number(self, pragma: str) -> int:
        return int(self._db.execute(f"PRAGMA {pragma}").fetchone()[0])


class _Connection(sqlite3.Connection):
    """SQLite's messages quote damaged data, which Python may be unable to decode."""

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*statement)
        except UnicodeDecodeError as error:
            said = bytes(error.object).decode("utf-8", "replace")
            raise sqlite3.DatabaseError(said) from error


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, factory=_Connection
    )
    # Damaged text is replaced: decoding it must not fail before its checksum says so.
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    return connection


@contextmanager
def _closed_on_error(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    try:
        yield connection
    except BaseException:
        connection.close()
        raise


def _crc_of_fact(fact: FactRow) -> int:
    return zlib.crc32(fact.value, zlib.crc32(f"{fact.kind}\0{fact.name}\0".encode()))


def _crc_of_piece(owner: str, ordinal: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(f"{owner}\0{ordinal}".encode()))
