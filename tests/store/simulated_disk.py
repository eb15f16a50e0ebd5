"""A disk that can be cut off between any two writes, and loses what was not synced.

SQLite's own promises are taken for granted: a commit with `synchronous = FULL` has synced the log,
and the log is begun again, with other salts in its head, only after all of it is in the database
and synced. A mark is less than a sector, so it is one of those that were written since the last
sync.
"""

from __future__ import annotations

import shutil
import sqlite3
import struct
from pathlib import Path
from random import Random
from typing import Literal

from rollout_sched.store.disk import Disk
from rollout_sched.store.store import PAGE, ROWS

SECTOR = 512

#: Of `PRAGMA synchronous`: a commit is synced.
FULL = 2

#: Bytes of the log's head, which is synced before anything is written after it, and of a frame.
HEAD, FRAME = 32, 24 + PAGE

#: The number of frames, two salts, and the number of frames that a checkpoint has copied into the
#: database, in the head of the log's index in shared memory.
_INDEX = struct.Struct("=16xI12xII56xI")

#: What is lost when the power fails: of all that was not synced some sectors, or all.
Power = Random | Literal["all"]


class Crash(BaseException):
    """The process is gone."""


def full() -> sqlite3.OperationalError:
    """What SQLite raises on a full disk."""
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


class SimulatedDisk(Disk):
    """The files of one store.

    `run`: of the machine, which a loss of power ends.
    `crash_in`: how many commits and checkpoints go well before the process dies; None: all.
    `free`: bytes that are left; a commit of more fails as on a full disk.
    """

    def __init__(self, folder: Path, run: str = "first") -> None:
        self.folder = folder
        self.run = run
        self.crash_in: int | None = None
        self.free: int | None = None
        self._synced = 0  # bytes of the log
        self._salts = (0, 0)
        mark = folder / "mark"
        self._marks = [mark.read_bytes() if mark.exists() else b""]  # from the synced one on

    def commit(self, database: sqlite3.Connection) -> None:
        """As SQLite's: a transaction that writes nothing syncs nothing."""
        self._step()
        if self.free is not None:
            if self.free < PAGE:
                raise full()
            self.free -= PAGE
        before = self._log()
        super().commit(database)
        end, salts = after = self._log()
        if salts != self._salts:
            self._salts, self._synced = salts, HEAD
        level = database.execute("PRAGMA synchronous").fetchone()[0]
        # A checkpoint after the commit has synced the log before it wrote into the database.
        if (level == FULL and after != before) or (
            level and self._copied() == (end - HEAD) // FRAME
        ):
            self._synced = end

    def checkpoint(self, database: sqlite3.Connection) -> None:
        self._step()
        super().checkpoint(database)

    def write_mark(self, file: int, record: bytes, *, synced: bool) -> None:
        self._step()
        super().write_mark(file, record, synced=synced)
        self._marks = [record] if synced else [*self._marks, record]

    def boot(self) -> str:
        return self.run

    def room(self, folder: Path) -> int:
        return 2**40 if self.free is None else self.free

    def left_by_a_crash(self, to: Path, power: Power | None = None) -> Path:
        """A copy of what the next process finds. With `power`, that failed."""
        shutil.copytree(self.folder, to)
        log = to / f"{ROWS}-wal"
        if power is not None:
            mark = self._marks[0] if power == "all" else power.choice(self._marks)
            (to / "mark").write_bytes(mark)
            if log.exists():
                log.write_bytes(self._lose(log.read_bytes(), power))
        return to

    def _lose(self, log: bytes, power: Power) -> bytes:
        if power == "all":
            return log[: self._synced]
        kept = bytearray(log)
        for start in range(self._synced, len(kept), SECTOR):
            if power.random() < 0.1:
                end = min(start + SECTOR, len(kept))
                kept[start:end] = bytes(end - start)
        return bytes(kept[: power.randint(self._synced, len(kept))])

    def _log(self) -> tuple[int, tuple[int, int]]:
        """The end of the log, and its salts."""
        frames, *salts, _ = self._index()
        return HEAD + frames * FRAME, (salts[0], salts[1])

    def _copied(self) -> int:
        """Frames of the log that are in the database."""
        return self._index()[3]

    def _index(self) -> tuple[int, int, int, int]:
        with (self.folder / f"{ROWS}-shm").open("rb") as index:
            frames, one, other, copied = _INDEX.unpack(index.read(_INDEX.size))
        return frames, one, other, copied

    def _step(self) -> None:
        if self.crash_in is not None:
            if self.crash_in == 0:
                raise Crash
            self.crash_in -= 1


def damage_log(folder: Path, rng: Random) -> None:
    """Flip a bit of the log, cut it, zero a page of it, or remove it."""
    log = folder / f"{ROWS}-wal"
    data = bytearray(log.read_bytes())
    at = rng.randrange(len(data))
    match rng.choice(("flip", "cut", "zero", "remove")):
        case "flip":
            data[at] ^= 1 << rng.randrange(8)
        case "cut":
            del data[at:]
        case "zero":
            data[at : at + PAGE] = bytes(len(data[at : at + PAGE]))
        case "remove":
            log.unlink()
            return
    log.write_bytes(data)
