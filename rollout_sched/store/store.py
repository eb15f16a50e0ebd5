"""A store: facts and pieces of tokens, changed in transactions and read at the next opening.

Everything is in one SQLite database. Every row has a checksum, because SQLite has none outside of
its log: a flipped byte in a value would be read as if it were correct. Its keys need none: they are
in an index too, and SQLite checks that table and index agree.

The log is written in order and synced as a whole, and a page is changed only after it was synced,
so what is read after a loss of power is the content after some transaction, and after the last
synced one or a later one. Of a damaged log SQLite silently takes the part before the damage, so
each transaction has a number, and a mark beside the database says which must be there. A sum of all
checksums says whether the rows are those of one transaction: pages of a checkpoint that was not
finished are of several, if the log is gone that would complete them.
"""

from __future__ import annotations

import sqlite3
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from rollout_sched.core.errors import reason_of
from rollout_sched.store.disk import MAX_NUMBER, MAX_TIME, Disk, Mark, MarkFile, StoreLock
from rollout_sched.store.errors import (
    PieceDamaged,
    StoreBehind,
    StoreDamaged,
    StoreError,
    StoreOfOtherFormat,
)
from rollout_sched.store.transaction import Transaction

#: What must be on the disk before a call returns: promised changes, all changes, or nothing.
Durable = Literal["batch", "event", "off"]

#: The database within the folder.
ROWS = "rows.sqlite"

#: Unused bytes to keep in the file for later data, beyond as many as are in use.
SPARE = 2**26

#: Most bytes by which the file shrinks at once, so that a promise does not wait for long.
SHRUNK_AT_ONCE = 2**24

_STORE, _EPOCH = "store", "epoch"

#: Format of rows and tokens. This version cannot read any other number.
FORMAT = 3

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

#: The checksums stand before the data, so that a trigger finds them without reading it.
_TABLES = (
    "CREATE TABLE facts (id INTEGER PRIMARY KEY, kind TEXT, name TEXT, crc INTEGER, value BLOB, "
    "UNIQUE (kind, name))",
    "CREATE TABLE pieces (id INTEGER PRIMARY KEY, owner TEXT, ordinal INTEGER, crc INTEGER, "
    "data BLOB, UNIQUE (owner, ordinal))",
    "CREATE TABLE content (number INTEGER, at REAL, crcs INTEGER)",
    "INSERT INTO content VALUES (0, 0, 0)",
    *(
        f"CREATE TRIGGER {table}_{change[:3]} AFTER {change} ON {table} "
        f"BEGIN UPDATE content SET crcs = crcs {difference}; END"
        for table in ("facts", "pieces")
        for change, difference in (
            ("INSERT", "+ new.crc"),
            ("UPDATE", "- old.crc + new.crc"),
            ("DELETE", "- old.crc"),
        )
    ),
)

_PUT_FACT = """INSERT INTO facts (kind, name, value, crc) VALUES (?, ?, ?, ?)
ON CONFLICT (kind, name) DO UPDATE SET value = excluded.value, crc = excluded.crc"""
_PUT_PIECE = """INSERT INTO pieces (owner, ordinal, crc, data) VALUES (?, ?, ?, ?)
ON CONFLICT (owner, ordinal) DO UPDATE SET crc = excluded.crc, data = excluded.data"""

#: Most characters that are shown of a damaged row.
_MAX_SHOWN = 80


class Losses(msgspec.Struct):
    """What was missing or damaged when the store was opened; damaged rows were dropped.

    facts         as "kind name"
    owners        owners that have lost tokens
    transactions  in words: those that a loss of power has cost, or that were given up
    """

    facts: list[str] = []
    owners: list[str] = []
    transactions: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.facts or self.owners or self.transactions)

    def summary(self) -> list[str]:
        """One line for each kind of loss, for people."""
        said = (
            ("damaged facts", self.facts),
            ("damaged tokens of", self.owners),
            ("lost transactions", self.transactions),
        )
        return [f"{what}: {', '.join(names)}" for what, names in said if names]


class Store:
    """The folder of one run of schedulers. Raises StoreError if it cannot be opened.

    One thread applies changes; any thread may read pieces, for which it never waits for a change.
    A synced change survives a power loss, and so do all before it; others survive the death of the
    process.

    epoch       counts its openings from 1
    losses      what was missing or damaged when it was opened; the rest is intact
    live_bytes  size of all current tokens

    `salvage`: give up the transactions that are missing, for which it else raises StoreBehind, and
    begin no epoch.
    """

    def __init__(
        self,
        folder: Path,
        *,
        durable: Durable = "batch",
        disk: Disk | None = None,
        salvage: bool = False,
    ) -> None:
        self.folder = folder
        self.durable = durable
        self.disk = disk or Disk()
        self.losses = Losses()
        self.live_bytes = 0
        self._facts: dict[str, dict[str, bytes]] = {}
        self._sizes: dict[str, dict[int, int]] = {}  # of the pieces, by owner and ordinal
        self._reading = Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = StoreLock(folder)
        except OSError as error:
            raise StoreError(
                f"store {folder}: {reason_of(error)}; choose a writable folder"
            ) from error
        with self._telling_what_is_wrong():
            self._mark_file = MarkFile(folder, self.disk)
            if (folder / ROWS).exists():
                self.disk.sync(folder / ROWS)  # what an earlier process did not sync
            self._db, self._reader = _connected(folder / ROWS), _connected(folder / ROWS)
            try:
                for setting in _SETTINGS:
                    self._db.execute(setting).fetchall()
                self._check_format()
                mark = self._load(salvage=salvage)
                self.epoch = self._last_epoch(mark) + (not salvage)
                self._mark = replace(mark, epoch=self.epoch)
                self._mark_file.write(self._mark, synced=True)
                if not salvage:
                    self._begin_epoch()
            except BaseException:
                self._reader.close()
                self._db.close()
                self._mark_file.close()
                raise

    # -- reading ---------------------------------------------------------------------------

    def facts(self, kind: str) -> dict[str, bytes]:
        """The facts of one kind by name, as of the opening of the store; only once, so that they
        need not stay in memory."""
        return self._facts.pop(kind, {})

    def owners(self) -> list[str]:
        """All owners of pieces."""
        return list(self._sizes)

    def pieces(self, owner: str) -> dict[int, bytes]:
        """The pieces of an owner by ordinal, ascending. Raises PieceDamaged if the disk has damaged
        them since the opening, which would have found it."""
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

    @property
    def disk_bytes(self) -> int:
        """Size of the database and its log on the disk."""
        return sum(path.stat().st_size for path in self.folder.glob(f"{ROWS}*"))

    # -- changing --------------------------------------------------------------------------

    def apply(self, changes: Transaction, *, promised: bool = False) -> None:
        """Apply all or nothing. With `promised`, wait until it is as durable as configured.

        Raises OSError or sqlite3.Error; then nothing has changed.
        """
        synced = None if self.durable == "off" else promised or self.durable == "event"
        written = list(changes.written())
        number, at = self._mark.written + 1, time.time()
        with self._transaction(synced=synced):
            self._write_facts(changes)
            self._write_pieces(changes, written)
            self._db.execute("UPDATE content SET number = ?, at = ?", (number, at))
        # Only after the commit: a mark may be behind the database, never ahead of it.
        safe = number if synced else self._mark.synced
        self._mark = replace(self._mark, written=number, synced=safe, at=at)
        self._mark_file.write(self._mark, synced=bool(synced))
        for owner in changes.cleared:
            self.live_bytes -= sum(self._sizes.pop(owner, {}).values())
        for owner, ordinal in changes.taken_back():
            self._resize(owner, ordinal, None)
        for owner, ordinal, data in written:
            self._resize(owner, ordinal, len(data))

    def tidy(self) -> None:
        """Bound the disk space: return what is unused, beyond as much as is used and some. Call it
        after changes. Raises OSError or sqlite3.Error."""
        free = self._number("freelist_count")
        spare = PAGE * (2 * free - self._number("page_count")) - SPARE
        if spare > 0:
            self._shrink(min(spare, SHRUNK_AT_ONCE))

    def _shrink(self, size: int) -> None:
        """Move pages from the end of the file to unused ones, to make it smaller by `size` bytes
        when the log is next copied into it."""
        with self._transaction(synced=False):
            for _ in range(size // PAGE):  # Python ends this statement after one page
                self._db.execute("PRAGMA incremental_vacuum(1)")

    def close(self) -> None:
        """Put everything on disk, for any `durable`, and close. Raises OSError, sqlite3.Error."""
        try:
            self._reader.close()
            self._db.execute("PRAGMA synchronous = FULL")
            self.disk.checkpoint(self._db)
            self._db.close()
            self.disk.sync(self.folder / ROWS)  # of a log that was copied before, SQLite syncs none
            last = self._mark.written
            self._mark_file.write(replace(self._mark, synced=last), synced=True)
        finally:
            self._db.close()
            self._mark_file.close()
            self._lock.close()

    # -- opening ---------------------------------------------------------------------------

    @contextmanager
    def _telling_what_is_wrong(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._lock.close()
            if isinstance(error, sqlite3.Error):
                raise StoreDamaged(self.folder, error) from error
            if isinstance(error, OSError):
                raise StoreError(f"store {self.folder}: {error}; check the disk") from error
            raise

    def _check_format(self) -> None:
        found = self._number("user_version")
        if found == 0:
            with self._transaction():
                for statement in _TABLES:
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {FORMAT}")
        elif found != FORMAT:
            raise StoreOfOtherFormat(
                f"store {self.folder} has format {found}, this version writes {FORMAT}; finish its "
                "run with the version that wrote it, or use another folder"
            )
        problem = str(self._db.execute("PRAGMA integrity_check(1)").fetchone()[0])
        if problem != "ok":
            why = problem.removeprefix("*** in database main ***\n")
            raise StoreDamaged(self.folder, why)

    def _load(self, *, salvage: bool) -> Mark:
        """Load the intact facts, check all tokens, and drop the rest, which `losses` names. Returns
        the mark to go on with."""
        damaged_facts, damaged_pieces = [], []
        crcs = intact = 0
        for id, kind, name, crc, value in self._db.execute("SELECT * FROM facts"):
            crcs += crc if isinstance(crc, int) else 0
            if isinstance(value, bytes) and _crc_of_fact(kind, name, value) == crc:
                self._facts.setdefault(kind, {})[name] = value
                intact += crc
            else:
                damaged_facts.append((id,))
                self.losses.facts.append(f"{kind} {name}"[:_MAX_SHOWN])
        owners = set()
        for id, owner, ordinal, crc, data in self._db.execute("SELECT * FROM pieces"):
            crcs += crc if isinstance(crc, int) else 0
            if isinstance(data, bytes) and _crc_of_piece(owner, ordinal, data) == crc:
                self._resize(owner, ordinal, len(data))
                intact += crc
            else:
                damaged_pieces.append((id,))
                owners.add(owner)
        self.losses.owners += sorted(owners)
        mark = self._compared(crcs, salvage=salvage)
        if self.losses:
            with self._transaction():
                self._db.executemany("DELETE FROM facts WHERE id = ?", damaged_facts)
                self._db.executemany("DELETE FROM pieces WHERE id = ?", damaged_pieces)
                self._db.execute("DELETE FROM content")
                counted = mark.written, mark.at, intact
                self._db.execute("INSERT INTO content VALUES (?, ?, ?)", counted)
        return mark

    def _compared(self, crcs: int, *, salvage: bool) -> Mark:
        """Compare what was loaded with the mark and with the sum of its checksums. Raises
        StoreBehind, unless it is to be salvaged."""
        number, at, kept = self._counted()
        found = self._mark_file.read()
        mark, boot = found or Mark(), self.disk.boot()
        powered = mark.boot == boot != ""  # ever since
        missing = number < mark.written
        why = ""
        if found is None and number:
            why = "has lost its mark, without which nobody knows whether transactions are missing"
        elif kept != crcs:
            why = "mixes rows of several transactions: a part of its log, or of its pages, is lost"
        elif missing and (powered or number < mark.synced):
            why = f"lacks {_after(number, at, mark)}: its log was damaged, cut or replaced"
        if why and not salvage:
            raise StoreBehind(self.folder, why)
        if missing and not why:
            why = _after(number, at, mark)
        elif not why and mark.written > mark.synced == 0 and not powered:
            why = "any that were not on the disk when the machine stopped (durable off)"
        if why:
            self.losses.transactions.append(why)
        safe = 0 if self.durable == "off" else min(mark.synced, number)
        return Mark(number, safe, at, boot, mark.epoch)

    def _counted(self) -> tuple[int, float, int]:
        """Of the content: number and time of its last transaction, sum of its checksums."""
        match self._db.execute("SELECT number, at, crcs FROM content").fetchall():
            case [(int(number), float(at), int(crcs))]:
                if 0 <= number <= MAX_NUMBER and 0 <= at <= MAX_TIME:
                    return number, at, crcs
        return 0, 0.0, -1  # it is damaged: the sum of no rows

    def _last_epoch(self, mark: Mark) -> int:
        """If no number is left, the clock gives one that is higher than any count of openings."""
        known = self.facts(_STORE).get(_EPOCH)
        new = known is None and not self.losses
        last = 0 if new else int(time.time()) if known is None else int(known)
        return max(last, mark.epoch)

    def _begin_epoch(self) -> None:
        beginning = Transaction()
        beginning.put(_STORE, _EPOCH, b"%d" % self.epoch)
        self.apply(beginning, promised=True)

    # -- in SQL ----------------------------------------------------------------------------

    @contextmanager
    def _transaction(self, *, synced: bool | None = True) -> Iterator[None]:
        """All or nothing. `synced` None: a power loss may damage the database."""
        level = "OFF" if synced is None else "FULL" if synced else "NORMAL"
        self._db.execute(f"PRAGMA synchronous = {level}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.disk.commit(self._db)
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _write_facts(self, changes: Transaction) -> None:
        gone = [key for key, value in changes.facts.items() if value is None]
        self._db.executemany("DELETE FROM facts WHERE kind = ? AND name = ?", gone)
        facts = [(*key, value) for key, value in changes.facts.items() if value is not None]
        self._db.executemany(_PUT_FACT, [(*fact, _crc_of_fact(*fact)) for fact in facts])

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
        with _as_database_error():
            return super().execute(*statement)

    def executemany(self, *statement: Any) -> sqlite3.Cursor:
        with _as_database_error():
            return super().executemany(*statement)


@contextmanager
def _as_database_error() -> Iterator[None]:
    try:
        yield
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


def _after(number: int, at: float, mark: Mark) -> str:
    """The transactions after this one, in words."""
    one = number + 1 == mark.written
    which = f" {mark.written}" if one else f"s {number + 1} to {mark.written}"
    later = f"after {_clock(at)} and " * (number > 0)
    return f"transaction{which}, written {later}until {_clock(mark.at)}"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _crc_of_fact(kind: str, name: str, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(f"{kind}\0{name}\0".encode()))


def _crc_of_piece(owner: str, ordinal: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(f"{owner}\0{ordinal}".encode()))
