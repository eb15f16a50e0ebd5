"""A store: facts and pieces of tokens, changed in transactions and read at the next opening."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from rollout_sched.store.database import FORMAT, Database
from rollout_sched.store.disk import Disk, StoreLock
from rollout_sched.store.errors import StoreDamaged, StoreError, StoreOfOtherFormat
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


class Losses(msgspec.Struct):
    """What was damaged when the store was opened, and was dropped.

    facts   as "kind name"
    owners  owners that have lost tokens
    """

    facts: list[str] = []
    owners: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.facts or self.owners)

    def summary(self) -> list[str]:
        """One line for each kind of loss, for people."""
        said = ("damaged facts", self.facts), ("damaged tokens of", self.owners)
        return [f"{what}: {', '.join(names)}" for what, names in said if names]


class Store:
    """The folder of one run of schedulers. Raises StoreError if it cannot be opened.

    `epoch` counts its openings from 1. `losses`: what was damaged; the rest is intact. One thread
    applies changes; any thread may read.
    """

    def __init__(
        self, folder: Path, *, durable: Durable = "batch", disk: Disk | None = None
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
                self._load()
                self.epoch = self._begin_epoch()
            except BaseException:
                self._database.close(synced=False)
                raise

    # -- reading ---------------------------------------------------------------------------

    def facts(self, kind: str) -> dict[str, bytes]:
        """The facts of one kind by name, as of the opening of the store; only once, so that they
        need not stay in memory."""
        return self._facts.pop(kind, {})

    def owners(self) -> list[str]:
        """All owners of pieces."""
        return self._database.owners()

    def pieces(self, owner: str) -> dict[int, bytes]:
        """The pieces of an owner, by ordinal, ascending. Raises PieceDamaged if the disk has
        damaged them since the opening, which would have found it."""
        return self._database.pieces(owner)

    def heads(self, owner: str, length: int) -> dict[int, bytes]:
        """The first bytes of each piece of an owner."""
        return self._database.heads(owner, length)

    @property
    def live_bytes(self) -> int:
        """Size of all current tokens."""
        return self._database.live_bytes

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
        self._database.write(changes, synced=synced)

    def tidy(self) -> None:
        """Bound the disk space: return what is unused, beyond as much as is used and some. Call it
        after changes. Raises OSError or sqlite3.Error."""
        free, used = self._database.free_bytes()
        if free > used + SPARE:
            self._database.shrink(min(free - used - SPARE, SHRUNK_AT_ONCE))

    def close(self) -> None:
        """Put everything on disk, for any `durable`, and close. Raises OSError, sqlite3.Error."""
        try:
            self._database.close()
        finally:
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
        found = self._database.format
        if found == 0:
            self._database.begin_anew()
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
        facts, damaged = self._database.load()
        for fact in facts:
            self._facts.setdefault(fact.kind, {})[fact.name] = fact.value
        self.losses.facts += damaged.facts.values()
        self.losses.owners += sorted(set(damaged.pieces.values()))
        if self.losses:
            self._database.drop(damaged)

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
