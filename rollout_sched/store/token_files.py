"""Files of tokens: only appended to, and overwritten once none of their pieces is in use.

Overwriting an existing file costs much less than growing a new one, for which the kernel must
allocate every page; so unused files are kept for later tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rollout_sched.store.disk import Disk
from rollout_sched.store.errors import PieceDamaged

#: Bytes after which a new file is started.
CAPACITY = 2**24

#: Unused space to keep for later tokens, in files, beyond twice the space in use.
SPARE = 4

_NAME = re.compile(r"(\d{8})\.tokens")


class PiecePlace(NamedTuple):
    """The place of a piece."""

    file: int
    offset: int
    length: int

    def head(self, length: int) -> PiecePlace:
        """The place of its first bytes."""
        return self._replace(length=min(length, self.length))


class TokenFiles:
    """The files of one folder. At opening, `take_up` tells which places are in use.

    A file without pieces in use is overwritten only once their removal is certain to survive a
    power loss, which `settled` reports: until then an old row that names it may come back.
    """

    def __init__(self, folder: Path, disk: Disk, capacity: int = CAPACITY) -> None:
        self._folder = folder
        self._disk = disk
        self._capacity = capacity
        folder.mkdir(exist_ok=True)
        self._sizes = {n: (folder / _name(n)).stat().st_size for n in _numbers(folder)}
        self._live: dict[int, int] = dict.fromkeys(self._sizes, 0)  # bytes in use in each
        self._open: dict[int, int] = {}  # descriptors
        self._emptied: set[int] = set()
        self._free: set[int] = set()
        self._current: int | None = None
        self._end = 0  # of the appended bytes in the current file
        self._unsynced: set[int] = set()
        self._made = False  # whether a file was created since the folder was last synced

    @property
    def live_bytes(self) -> int:
        return sum(self._live.values())

    @property
    def unsettled_bytes(self) -> int:
        """Size of the files without pieces in use that must not be overwritten yet."""
        return sum(self._sizes[number] for number in self._emptied)

    @property
    def disk_bytes(self) -> int:
        """Size of all files on the disk."""
        return sum(self._sizes.values())

    def take_up(self, places: Iterable[PiecePlace]) -> None:
        """The places in use, at opening; all others may be overwritten. It is unknown whether
        earlier writers synced the files."""
        for place in places:
            self._live[place.file] = self._live.get(place.file, 0) + place.length
        self._free = {number for number, live in self._live.items() if not live}
        self._unsynced = set(self._live) - self._free
        self._made = True

    def append(self, pieces: Sequence[bytes]) -> list[PiecePlace]:
        """Returns the place of each piece. After an error, none of them counts."""
        places: list[PiecePlace] = []
        try:
            while len(places) < len(pieces):
                places += self._append_to(self._room(), pieces[len(places) :])
        except BaseException:
            self.forget(places)
            raise
        return places

    def _append_to(self, number: int, pieces: Sequence[bytes]) -> list[PiecePlace]:
        """Append as many pieces as this file has room for, at least one."""
        places: list[PiecePlace] = []
        start = end = self._end
        for data in pieces:
            if places and end >= self._capacity:
                break
            places.append(PiecePlace(number, end, len(data)))
            end += len(data)
        self._unsynced.add(number)
        self._disk.write(self._file(number), pieces[: len(places)], start)
        self._live[number] += end - start
        self._end = end
        self._sizes[number] = max(self._sizes[number], end)
        return places

    def forget(self, places: Iterable[PiecePlace]) -> None:
        """These places are no longer in use."""
        for place in places:
            self._live[place.file] -= place.length
            if not self._live[place.file] and place.file != self._current:
                self._emptied.add(place.file)

    def settled(self) -> None:
        """Forgotten places cannot come back any more, even after a power loss."""
        self._free |= self._emptied
        self._emptied.clear()
        spare = self._capacity * SPARE
        for number in sorted(self._free, reverse=True):
            if self.disk_bytes <= 2 * self.live_bytes + spare:
                break
            self._remove(number)

    def sparsest(self) -> int | None:
        """The file whose pieces should be moved, so that the disk holds at most twice the bytes in
        use; None if it does already."""
        free = sum(self._sizes[number] for number in self._free | self._emptied)
        if self.disk_bytes - free <= 2 * self.live_bytes + self._capacity * SPARE:
            return None
        full = {n for n, live in self._live.items() if live and n != self._current}
        return min(full, key=lambda number: self._live[number] / self._sizes[number], default=None)

    def read(self, place: PiecePlace) -> bytes:
        """The bytes at a place. Raises PieceDamaged if the file is missing or too short."""
        try:
            data = self._disk.read(self._file(place.file, make=False), place.length, place.offset)
        except OSError as error:
            raise PieceDamaged(f"{_name(place.file)}: {error.strerror}") from error
        if len(data) != place.length:
            raise PieceDamaged(f"{_name(place.file)} is too short")
        return data

    def sync(self) -> None:
        """Wait until all appended bytes are on the disk."""
        for number in tuple(self._unsynced):
            self._disk.sync(self._file(number))
            self._unsynced.discard(number)
        if self._made:
            self._disk.sync_folder(self._folder)
            self._made = False

    def close(self) -> None:
        for file in self._open.values():
            os.close(file)
        self._open.clear()

    def _room(self) -> int:
        """The current file, to append at `_end`."""
        if self._current is None or self._end >= self._capacity:
            before, self._current, self._end = self._current, self._next(), 0
            if before is not None and not self._live[before]:
                self._emptied.add(before)
        return self._current

    def _next(self) -> int:
        if self._free:
            number = min(self._free)
            self._free.discard(number)
            return number
        number = max(self._live, default=0) + 1
        self._live[number] = self._sizes[number] = 0
        return number

    def _file(self, number: int, *, make: bool = True) -> int:
        file = self._open.get(number)
        if file is None:
            path = self._folder / _name(number)
            if not path.exists():
                if not make:
                    raise FileNotFoundError(2, "no such file", str(path))
                self._made = True
            file = self._open[number] = self._disk.open(path)
        return file

    def _remove(self, number: int) -> None:
        self._free.discard(number)
        self._unsynced.discard(number)
        file = self._open.pop(number, None)
        if file is not None:
            os.close(file)
        with suppress(OSError):  # if it is not removed, it is overwritten later
            (self._folder / _name(number)).unlink()
        del self._sizes[number], self._live[number]


def _name(number: int) -> str:
    return f"{number:08d}.tokens"


def _numbers(folder: Path) -> list[int]:
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return [int(match[1]) for match in found if match is not None]
