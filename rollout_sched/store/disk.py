"""Every way in which a store touches the disk, in one place: tests put another disk here."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path

#: Buffers that one call may write (POSIX's IOV_MAX on Linux).
_AT_ONCE = 1024

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Disk:
    """The machine's own. Every call may raise OSError or sqlite3.Error."""

    def open(self, path: Path) -> int:
        """A file's descriptor; a new file where there is none."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, file: int, buffers: Sequence[bytes], offset: int) -> None:
        """All of the buffers, one after the other."""
        for first in range(0, len(buffers), _AT_ONCE):
            some = buffers[first : first + _AT_ONCE]
            total = sum(map(len, some))
            done = os.pwritev(file, some, offset)
            if done < total:  # a signal, or the last room that there was
                self._finish(file, b"".join(some)[done:], offset + done)
            offset += total

    def _finish(self, file: int, rest: bytes, offset: int) -> None:
        left = memoryview(rest)
        while left:
            done = os.pwrite(file, left, offset)
            left, offset = left[done:], offset + done

    def read(self, file: int, length: int, offset: int) -> bytes:
        return os.pread(file, length, offset)

    def sync(self, file: int) -> None:
        os.fsync(file)

    def sync_folder(self, folder: Path) -> None:
        """Files that were made there or went are so for good."""
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def commit(self, database: sqlite3.Connection) -> None:
        database.execute("COMMIT")

    def checkpoint(self, database: sqlite3.Connection) -> None:
        """Bring what the write-ahead log holds into the database, and begin the log anew."""
        database.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()

    def room(self, folder: Path) -> int:
        """Bytes that are free."""
        return shutil.disk_usage(folder).free


def is_full(error: Exception) -> bool:
    """Whether it says that there is no room, which may pass."""
    if isinstance(error, sqlite3.OperationalError):
        return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in _NO_ROOM
