"""The simulated disk of the gateway's machine: it is slow, fills up, fails, and loses power."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from rollout_sched.store.store import ROWS
from tests.simulation import threads
from tests.store.simulated_disk import Crash, SimulatedDisk

__all__ = ["Crash", "MachineDisk", "rot_row", "rot_tokens"]

#: Seconds of a commit, if a thread waits for it.
SYNC_S = 0.002


class MachineDisk(SimulatedDisk):
    """`on_crash` is called after `crash_in` writes, before the next one. `fails`: every write
    reports a broken disk. When it is `dead`, no write reaches it."""

    def __init__(self, folder: Path, run: str, on_crash: Callable[[], None]) -> None:
        super().__init__(folder, run)
        self.fails = False
        self.dead = False
        self.steps = 0
        self._on_crash = on_crash

    def commit(self, database: sqlite3.Connection) -> None:
        thread = threads.current()
        if thread is not None:
            thread.sleep(SYNC_S)
        super().commit(database)

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


def rot_tokens(store: Path, rng: Random, share: float) -> list[str]:
    """Flip a byte in some pieces of a closed store, at least in one if there are any. Returns their
    owners."""
    with _rows(store) as rows:
        pieces = _all(rows, "SELECT id, owner, data FROM pieces ORDER BY owner, ordinal")
        some = [piece for piece in pieces if rng.random() < share]
        if pieces and not some:
            some = [rng.choice(pieces)]
        for id, _, data in some:
            at = rng.randrange(len(data))
            rotten = data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]
            rows.execute("UPDATE pieces SET data = ? WHERE id = ?", (rotten, id))
    return [owner for _, owner, _ in some]


def rot_row(store: Path, rng: Random, kind: str) -> str:
    """Damage a fact of a closed store. Returns its name; "" if there is none."""
    with _rows(store) as rows:
        names = _all(rows, "SELECT name FROM facts WHERE kind = ? ORDER BY name", kind)
        if not names:
            return ""
        (name,) = rng.choice(names)
        change = "UPDATE facts SET crc = crc + 1 WHERE kind = ? AND name = ?"
        rows.execute(change, (kind, name))
    return str(name)


@contextmanager
def _rows(store: Path) -> Iterator[sqlite3.Connection]:
    """The database of a closed store; an empty one if it was not made yet."""
    path = store / ROWS
    with closing(sqlite3.connect(path if path.exists() else ":memory:")) as rows, rows:
        yield rows


def _all(rows: sqlite3.Connection, select: str, *values: str) -> list[tuple[Any, ...]]:
    try:
        return rows.execute(select, values).fetchall()
    except sqlite3.Error:  # there are no tables yet
        return []
