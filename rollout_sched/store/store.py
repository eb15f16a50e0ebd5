"""A store: facts and pieces of tokens, changed in transactions and read at the next opening."""

from __future__ import annotations

import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Literal

import msgspec

from rollout_sched.store.database import FORMAT, Database, FactRow, PieceRow, Write
from rollout_sched.store.disk import Disk, StoreLock
from rollout_sched.store.errors import PieceDamaged, StoreDamaged, StoreError, StoreOfOtherFormat
from rollout_sched.store.token_files import CAPACITY, TokenFiles
from rollout_sched.store.transaction import Transaction

# ------------------------------------------------------------------------------------------
# The index of a store's pieces of tokens: their owners and their places.

#: Reader threads; reading a disk and computing checksums gains nothing from more.
_READERS = 4


class PieceBook:
    """One thread writes and any thread may read: while the lock is held, no place is freed, so a
    place that was looked up stays valid."""

    def __init__(self, files: TokenFiles) -> None:
        self._files = files
        self._pieces: dict[str, dict[int, PieceRow]] = {}
        self._lock = Lock()

    def load(self, pieces: Iterable[PieceRow]) -> list[PieceRow]:
        """Load the rows when the store is opened. Returns the damaged pieces, which are not kept in
        the book."""
        by_file: dict[int, list[PieceRow]] = {}
        for piece in pieces:
            by_file.setdefault(piece.place.file, []).append(piece)
        with ThreadPoolExecutor(_READERS) as readers:
            damaged = [p for some in readers.map(self._damaged, by_file.values()) for p in some]
        gone = {(piece.owner, piece.ordinal) for piece in damaged}
        for here in by_file.values():
            self._add(piece for piece in here if (piece.owner, piece.ordinal) not in gone)
        self._files.take_up(p.place for owned in self._pieces.values() for p in owned.values())
        return damaged

    def owners(self) -> list[str]:
        with self._lock:
            return list(self._pieces)

    def read(self, owner: str) -> dict[int, bytes]:
        """The pieces of an owner by ordinal, ascending. Raises PieceDamaged."""
        with self._lock:
            found = self._pieces.get(owner, {})
            return {ordinal: self.read_piece(found[ordinal]) for ordinal in sorted(found)}

    def heads(self, owner: str, length: int) -> dict[int, bytes]:
        """The first bytes of each piece, unchecked. Raises PieceDamaged."""
        with self._lock:
            found = self._pieces.get(owner, {})
            return {
                ordinal: self._files.read(found[ordinal].place.head(length))
                for ordinal in sorted(found)
            }

    def read_piece(self, piece: PieceRow) -> bytes:
        """The bytes of a piece. Raises PieceDamaged."""
        data = self._files.read(piece.place)
        if checksum(piece.owner, piece.ordinal, data) != piece.crc:
            raise PieceDamaged(f"piece {piece.ordinal} of {piece.owner!r} has a wrong checksum")
        return data

    def append(self, changes: Transaction) -> list[PieceRow]:
        """Write the bytes of new pieces; they count once they are noted. Raises OSError."""
        written = list(changes.written())
        places = self._files.append([data for _, _, data in written])
        return [
            PieceRow(owner, ordinal, place, checksum(owner, ordinal, data))
            for (owner, ordinal, data), place in zip(written, places, strict=True)
        ]

    def going(self, changes: Transaction) -> list[PieceRow]:
        """The pieces that a transaction removes or replaces, those of cleared owners included."""
        keys = set(changes.named())
        for owner in changes.cleared:
            keys |= {(owner, ordinal) for ordinal in self._pieces.get(owner, ())}
        known = (self._pieces.get(owner, {}).get(ordinal) for owner, ordinal in keys)
        return [piece for piece in known if piece is not None]

    def note(self, added: Sequence[PieceRow], gone: Sequence[PieceRow]) -> None:
        """Update the book after the rows were written."""
        with self._lock:
            for piece in gone:
                owned = self._pieces[piece.owner]
                del owned[piece.ordinal]
                if not owned:
                    del self._pieces[piece.owner]
            self._add(added)
            self._files.forget(piece.place for piece in gone)

    def sparse(self) -> list[PieceRow]:
        """The pieces to move, so that their file can be overwritten."""
        file = self._files.sparsest()
        if file is None:
            return []
        every = (piece for owned in self._pieces.values() for piece in owned.values())
        return [piece for piece in every if piece.place.file == file]

    def settled(self) -> None:
        """Removed pieces cannot come back any more."""
        with self._lock:
            self._files.settled()

    def _add(self, pieces: Iterable[PieceRow]) -> None:
        for piece in pieces:
            self._pieces.setdefault(piece.owner, {})[piece.ordinal] = piece

    def _damaged(self, pieces: list[PieceRow]) -> list[PieceRow]:
        """The damaged ones of pieces in one file."""
        damaged = []
        for piece in sorted(pieces, key=lambda piece: piece.place):
            try:
                self.read_piece(piece)
            except PieceDamaged:
                damaged.append(piece)
        return damaged


def checksum(owner: str, ordinal: int, data: bytes) -> int:
    """The checksum of a piece and its owner."""
    return zlib.crc32(data, zlib.crc32(f"{owner}\0{ordinal}".encode()))


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
