"""Stores with flipped bytes: opened with the intact data, or refused with a clear error.

An input is a list of flips of five bytes each: what to do, the position in the database or in the
mark (three bytes) and the new byte. All data that is read is as it was written, and all errors are
the store's own.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
import tempfile
from contextlib import suppress
from pathlib import Path

from rollout_sched.store.errors import PieceDamaged, StoreError
from rollout_sched.store.store import PAGE, ROWS, Store
from rollout_sched.store.transaction import Transaction
from tests.fuzz.laws import hold

_FLIP = 5

#: The first byte of a flip that truncates the database at the position, and of one that changes a
#: byte of the mark; any other changes one of the database.
_ENDS, _MARK = 7, 6

#: Most flips of one input; the rest is ignored.
MAX_FLIPS = 200

#: Where SQLite keeps its most important data: the headers of the file and of its first pages.
_HEADS = (*range(120), *(page * PAGE + at for page in range(1, 8) for at in range(20)))


class StoreFiles:
    name = "store-files"
    words = (b"\x00" * _FLIP, b"\xff" * _FLIP, b"\x00\x00\x00\x10\x00")
    corpus = (
        b"",
        b"\x00\x00\x00\x00\x00",
        b"\x00\x00\x00\x3c\x09",
        b"\x02\x00\x00\x10\xff",
        b"\x07\x00\x00\x10\x00",
    )

    def __init__(self) -> None:
        self._sound: Path | None = None  # created on first use
        self._facts: dict[str, bytes] = {}
        self._pieces: dict[tuple[str, int], bytes] = {}

    def make(self, rng: random.Random) -> bytes:
        flips = []
        for _ in range(rng.randint(1, 4)):
            at = rng.choice(_HEADS) if rng.random() < 0.4 else rng.randrange(2**24)
            flips.append(bytes([rng.randrange(8), *at.to_bytes(3, "big"), rng.randrange(256)]))
        return b"".join(flips)

    def check(self, data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            damaged = Path(shutil.copytree(self._a_sound_store(), Path(folder) / "store"))
            _flip(damaged, data)
            self._check_opened(damaged)

    def spend(self, data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            damaged = Path(shutil.copytree(self._a_sound_store(), Path(folder) / "store"))
            _flip(damaged, data)
            with suppress(StoreError):
                Store(damaged, durable="off").close()

    def _check_opened(self, folder: Path) -> None:
        try:
            store = Store(folder, durable="off")
        except StoreError:
            return
        facts = store.facts("kind")
        facts.pop("new", None)
        hold("a fact equals the written one", facts.items() <= self._facts.items(), facts)
        for owner in {*store.owners()} - {"new"}:
            with suppress(PieceDamaged):
                held = {(owner, number): data for number, data in store.pieces(owner).items()}
                hold("tokens equal the written ones", held.items() <= self._pieces.items(), held)
        changes = Transaction()
        changes.put("kind", "new", b"x")
        changes.append("new", 0, b"x")
        with suppress(sqlite3.Error):  # the writer reports it
            store.apply(changes)
        with suppress(sqlite3.Error):
            store.close()

    def _a_sound_store(self) -> Path:
        if self._sound is None:
            self._sound = Path(tempfile.mkdtemp()) / "store"
            self._facts = {f"name{n}": b"%d " % n * 100 for n in range(30)}
            self._pieces = {(f"owner{n % 5}", n): b"%d." % n * 50 for n in range(30)}
            store = Store(self._sound, durable="off")
            changes = Transaction()
            for name, value in self._facts.items():
                changes.put("kind", name, value)
            for (owner, ordinal), data in self._pieces.items():
                changes.append(owner, ordinal, data)
            store.apply(changes)
            store.close()
        return self._sound


def _flip(folder: Path, data: bytes) -> None:
    content, mark = (bytearray((folder / name).read_bytes()) for name in (ROWS, "mark"))
    for start in range(0, min(MAX_FLIPS, len(data) // _FLIP) * _FLIP, _FLIP):
        what, *place, value = data[start : start + _FLIP]
        flipped = mark if what == _MARK else content
        at = int.from_bytes(place, "big") % max(1, len(flipped))
        if what == _ENDS:
            del content[at:]
        elif flipped:
            flipped[at] = value
    (folder / ROWS).write_bytes(content)
    (folder / "mark").write_bytes(mark)
