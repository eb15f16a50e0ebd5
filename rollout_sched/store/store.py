"""A store: facts and pieces of tokens, changed in transactions and read at the next opening."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from rollout_sched.store.changes import Transaction
from rollout_sched.store.database import FORMAT, Database, FactRow, PieceRow, Write
from rollout_sched.store.disk import Disk
from rollout_sched.store.errors import StoreDamaged, StoreError, StoreOfOtherFormat
from rollout_sched.store.lock import StoreLock
from rollout_sched.store.piece_book import PieceBook
from rollout_sched.store.token_files import CAPACITY, TokenFiles

#: What must be on the disk before a call returns: promised changes, all changes, or nothing.
Durable = Literal["batch", "event", "off"]

#: Bytes of the write-ahead log after which it is copied into the database.
LOG_BYTES = 2**22

#: Names within the folder.
ROWS, TOKENS = "rows.sqlite", "tokens"

_STORE, _EPOCH = "store", "epoch"


class Losses(msgspec.Struct):
    """What was damaged when the store was opened, and was dropped.

    facts   as "kind name", as far as that can be read
    owners  owners that have lost tokens
    rows    of pieces, as "owner ordinal", as far as that can be read
    """

    facts: list[str] = []
    owners: list[str] = []
    rows: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.facts or self.owners or self.rows)

    def told(self) -> list[str]:
        """One line for each kind of loss, for people."""
        said = (
            ("damaged facts", self.facts),
            ("damaged places of tokens", self.rows),
            ("damaged or missing tokens of", self.owners),
        )
        return [f"{what}: {', '.join(names)}" for what, names in said if names]


class Store:
    """The folder of one run of schedulers. Raises StoreError if it cannot be opened.

    `epoch` counts its openings from 1. `losses`: what was damaged; the rest is intact. One thread
    applies changes; any thread may read.

    The bytes of a piece are written before its row. So if the bytes of a row are missing or wrong,
    the power failed in between, and the tokens of its owner are incomplete.
    """

    def __init__(
        self,
        folder: Path,
        *,
        durable: Durable = "batch",
        disk: Disk | None = None,
        capacity: int = CAPACITY,
    ) -> None:
        self.folder = folder
        self.durable = durable
        self.disk = disk or Disk()
        self.losses = Losses()
        self._facts: dict[str, dict[str, bytes]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = StoreLock(folder)
        except OSError as error:
            raise StoreError(f"store {folder}: {error}; choose a writable folder") from error
        with self._telling_what_is_wrong():
            self._database = Database(folder / ROWS, self.disk)
            try:
                self._check_format()
                self._files = TokenFiles(folder / TOKENS, self.disk, capacity)
                self._book = PieceBook(self._files)
                self._load()
                self.epoch = self._begin_epoch()
            except BaseException:
                self._database.close()
                raise

    # -- reading ---------------------------------------------------------------------------

    def facts(self, kind: str) -> dict[str, bytes]:
        """The facts of one kind by name, as of the opening of the store; only once, so that they
        need not stay in memory."""
        return self._facts.pop(kind, {})

    def owners(self) -> list[str]:
        """All owners of pieces."""
        return self._book.owners()

    def pieces(self, owner: str) -> dict[int, bytes]:
        """The pieces of an owner, by ordinal, ascending. Raises PieceDamaged if the disk has
        damaged them since the opening, which would have found it."""
        return self._book.read(owner)

    def heads(self, owner: str, length: int) -> dict[int, bytes]:
        """The first bytes of each piece of an owner."""
        return self._book.heads(owner, length)

    @property
    def live_bytes(self) -> int:
        """Size of all current tokens."""
        return self._files.live_bytes

    @property
    def disk_bytes(self) -> int:
        """Size of all tokens and rows on the disk."""
        rows = (self.folder / ROWS).stat().st_size
        return self._files.disk_bytes + rows + self._database.log_bytes()

    # -- changing --------------------------------------------------------------------------

    def apply(self, changes: Transaction, *, promised: bool = False) -> None:
        """Apply all or nothing. With `promised`, wait until it is as durable as configured.

        Raises OSError or sqlite3.Error; then nothing has changed.
        """
        added = self._book.append(changes)
        gone = self._book.going(changes)
        write = Write()
        for (kind, name), value in changes.facts.items():
            if value is None:
                write.drop_fact(kind, name)
            else:
                write.put_fact(FactRow(kind, name, value))
        self._commit(write, added, gone, promised=promised)

    def tidy(self) -> None:
        """Bound the disk space: copy the log into the database, and move the remaining pieces out
        of a file that is mostly unused. Call it after changes. Raises OSError or sqlite3.Error."""
        if self._database.log_bytes() > LOG_BYTES:
            self._database.checkpoint()
        sparse = self._book.sparse()
        if sparse:
            moving = Transaction()
            for piece in sparse:
                moving.append(piece.owner, piece.ordinal, self._book.read_piece(piece))
            self.apply(moving, promised=True)  # the moved pieces may have been promised

    def close(self) -> None:
        """Put everything on disk, for any `durable`, and close. Raises OSError, sqlite3.Error."""
        try:
            self._files.sync()
            self._database.checkpoint()
        finally:
            self._files.close()
            self._database.close()
            self._lock.close()

    def _commit(
        self, write: Write, added: list[PieceRow], gone: list[PieceRow], *, promised: bool
    ) -> None:
        write.drop_pieces(gone)
        write.put_pieces(added)
        synced = self._synced(promised)
        try:
            if synced:
                self._files.sync()
            self._database.write(write, synced=synced)
        except BaseException:
            self._files.forget(piece.place for piece in added)
            raise
        self._book.note(added, gone)
        if synced is not False:
            self._book.settled()

    def _synced(self, promised: bool) -> bool | None:
        if self.durable == "off":
            return None
        overdue = self._files.unsettled_bytes > 2 * CAPACITY
        return promised or overdue or self.durable == "event"

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
        found = self._database.format
        if found == 0 and not (self.folder / TOKENS).exists():
            self._database.begin_anew()
        elif found == 0:
            raise StoreDamaged(self.folder, "its token files exist, but its database is missing")
        elif found != FORMAT:
            raise StoreOfOtherFormat(
                f"store {self.folder} has format {found}, this version writes {FORMAT}; finish its "
                "run with the version that wrote it, or use another folder"
            )
        problem = self._database.problem()
        if problem:
            raise StoreDamaged(self.folder, problem)

    def _load(self) -> None:
        """Load the intact content and drop the rest, which `losses` names."""
        facts, spoilt_facts = self._database.facts()
        pieces, spoilt_pieces = self._database.pieces()
        for fact in facts:
            self._facts.setdefault(fact.kind, {})[fact.name] = fact.value
        damaged = self._book.load(pieces)
        self.losses.facts += spoilt_facts.values()
        self.losses.rows += spoilt_pieces.values()
        self.losses.owners += sorted({piece.owner for piece in damaged})
        if self.losses:
            write = Write()
            write.drop_rows(spoilt_facts, spoilt_pieces)
            write.drop_pieces(damaged)
            self._database.write(write, synced=True)

    def _begin_epoch(self) -> int:
        """A number that no earlier opening had. If the last number is lost, the clock gives one
        that is higher than any count of openings."""
        known = self.facts(_STORE).get(_EPOCH)
        new = known is None and not self.losses
        last = 0 if new else int(time.time()) if known is None else int(known)
        beginning = Transaction()
        beginning.put(_STORE, _EPOCH, b"%d" % (last + 1))
        self.apply(beginning, promised=True)
        return last + 1
