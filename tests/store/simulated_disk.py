"""A disk that can be cut off between any two writes, and loses what was not synced."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from random import Random
from typing import Literal

from rollout_sched.store.disk import Disk

SECTOR = 512

#: Of `PRAGMA synchronous`: a commit is synced.
FULL = 2


#: What is lost when the power fails.
Power = Random | Literal["rows", "tokens"]


class Crash(BaseException):
    """The process is gone."""


class SimulatedDisk(Disk):
    """The files of one folder, and what each held when it was last synced.

    `crash_in`: how many writes, syncs and commits go well before the process dies; None: all.
    `free`: bytes that are left; a write of more fails as on a full disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.crash_in: int | None = None
        self.free: int | None = None
        self._paths: dict[int, Path] = {}
        self._synced: dict[Path, bytes] = {}
        self._entered: set[Path] = set()  # files whose names are on the disk

    def open(self, path):
        file = super().open(path)
        self._paths[file] = path
        return file

    def write(self, file, buffers, offset):
        self._step()
        if self.free is not None:
            size = sum(map(len, buffers))
            if size > self.free:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.free -= size
        super().write(file, buffers, offset)

    def sync(self, file):
        self._step()
        path = self._paths[file]
        self._synced[path] = path.read_bytes()

    def sync_folder(self, folder):
        self._step()
        self._entered |= set(folder.iterdir())

    def commit(self, database):
        """As SQLite's: a transaction that writes nothing syncs nothing."""
        self._step()
        before = self._logs()
        super().commit(database)
        synced = database.execute("PRAGMA synchronous").fetchone()[0] == FULL
        if synced and self._logs() != before:
            self._note(".sqlite-wal")

    def checkpoint(self, database):
        self._step()
        super().checkpoint(database)
        self._note(".sqlite-wal")
        self._note(".sqlite")

    def room(self, folder):
        return 2**40 if self.free is None else self.free

    def left_by_a_crash(self, to: Path, power: Power | None = None) -> Path:
        """A copy of what the next process finds. With `power`, that failed, and of what was not
        synced the rows are lost, or the tokens, or each sector as the dice say."""
        shutil.copytree(self.folder, to)
        for path in sorted(to.rglob("*")) if power is not None else ():
            original = self.folder / path.relative_to(to)
            if (path.suffix == ".tokens" and power != "rows") or (
                path.name.endswith("-wal") and power != "tokens"
            ):
                self._lose(path, original, power)
        return to

    def _lose(self, copy: Path, path: Path, power: Power) -> None:
        dice = power if isinstance(power, Random) else None
        if path.suffix == ".tokens" and path not in self._entered and _lost(dice):
            copy.unlink()
            return
        now, before = path.read_bytes(), self._synced.get(path, b"")
        kept = bytearray(now)
        if _lost(dice):  # it did not grow, or not to its end
            del kept[max(len(before), dice.randrange(len(now) + 1) if dice else 0) :]
        for at in range(0, len(kept), SECTOR):
            if _lost(dice):
                sector = kept[at : at + SECTOR]
                kept[at : at + SECTOR] = before[at : at + SECTOR].ljust(len(sector), b"\0")[
                    : len(sector)
                ]
        copy.write_bytes(kept)

    def _logs(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted(self.folder.glob("*.sqlite-wal"))]

    def _note(self, ending: str) -> None:
        for path in self.folder.iterdir():
            if path.name.endswith(ending):
                self._synced[path] = path.read_bytes()

    def _step(self) -> None:
        if self.crash_in is not None:
            if self.crash_in == 0:
                raise Crash
            self.crash_in -= 1


def _lost(dice: Random | None) -> bool:
    return dice is None or dice.random() < 0.5
