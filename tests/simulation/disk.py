"""The simulated disk of the gateway's machine: it is slow, fills up, fails, and loses power."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from random import Random

from rollout_sched.store.store import ROWS, TOKENS
from tests.simulation import threads
from tests.store.simulated_disk import Crash, SimulatedDisk

__all__ = ["Crash", "MachineDisk", "rot_row", "rot_tokens"]

#: The least bytes that a commit adds to the log.
PAGE = 4096

#: Seconds of a write and of a sync, if a thread waits for them.
WRITE_S, SYNC_S = 0.0001, 0.002


class MachineDisk(SimulatedDisk):
    """`on_crash` is called after `crash_in` writes, before the next one. `fails`: every write
    reports a broken disk. When it is `dead`, no write reaches it."""

    def __init__(self, folder: Path, on_crash: Callable[[], None]) -> None:
        super().__init__(folder)
        # What a process finds at its start is durable.
        for path in folder.rglob("*"):
            if path.is_file():
                self._synced[path] = path.read_bytes()
                self._entered.add(path)
        self.fails = False
        self.dead = False
        self.steps = 0
        self._on_crash = on_crash

    def write(self, file: int, buffers: Sequence[bytes], offset: int) -> None:
        self._take(WRITE_S)
        super().write(file, buffers, offset)

    def sync(self, file: int) -> None:
        self._take(SYNC_S)
        super().sync(file)

    def commit(self, database: sqlite3.Connection) -> None:
        self._take(SYNC_S)
        if self.free is not None:
            if self.free < PAGE:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.free -= PAGE
        super().commit(database)

    def _take(self, seconds: float) -> None:
        thread = threads.current()
        if thread is not None:
            thread.sleep(seconds)

    def _step(self) -> None:
        if self.dead:
            raise Crash
        self.steps += 1
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")
        if self.crash_in == 0:
            self.dead = True
            self._on_crash()
        super()._step()


def rot_tokens(store: Path, dice: Random, share: float) -> list[str]:
    """Flip a byte in some pieces of a closed store, at least in one if there are any. Returns their
    owners."""
    if not (store / ROWS).exists():
        return []
    with closing(sqlite3.connect(store / ROWS)) as rows:
        try:
            pieces = rows.execute(
                "SELECT owner, file, start, length FROM pieces ORDER BY owner, ordinal"
            ).fetchall()
        except sqlite3.Error:  # it was not made yet
            return []
    some = [piece for piece in pieces if dice.random() < share]
    if pieces and not some:
        some = [dice.choice(pieces)]
    for _, file, start, length in some:
        path, at = store / TOKENS / f"{file:08d}.tokens", start + dice.randrange(length)
        data = bytearray(path.read_bytes() if path.exists() else b"")
        data[at : at + 1] = bytes(byte ^ 255 for byte in data[at : at + 1])
        path.write_bytes(data)
    return [owner for owner, *_ in some]


def rot_row(store: Path, dice: Random, kind: str) -> str:
    """Damage a fact of a closed store. Returns its name; "" if there is none."""
    if not (store / ROWS).exists():
        return ""
    with closing(sqlite3.connect(store / ROWS)) as rows, rows:
        try:
            select = "SELECT name FROM facts WHERE kind = ? ORDER BY name"
            names = [name for (name,) in rows.execute(select, (kind,))]
        except sqlite3.Error:  # it was not made yet
            return ""
        name = dice.choice(names) if names else ""
        change = "UPDATE facts SET crc = crc + 1 WHERE kind = ? AND name = ?"
        rows.execute(change, (kind, name))
    return name
