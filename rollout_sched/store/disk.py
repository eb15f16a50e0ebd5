"""All disk access of a store, in one place, so that tests can replace the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollout_sched.store.errors import StoreInUse

#: Most buffers per write call (POSIX's IOV_MAX on Linux).
_AT_ONCE = 1024

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Disk:
    """The machine's disk. Every call may raise OSError or sqlite3.Error."""

    def open(self, path: Path) -> int:
        """The descriptor of a file; the file is created if it does not exist."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, file: int, buffers: Sequence[bytes], offset: int) -> None:
        """Write all buffers, one after the other."""
        for first in range(0, len(buffers), _AT_ONCE):
            some = buffers[first : first + _AT_ONCE]
            total = sum(map(len, some))
            done = os.pwritev(file, some, offset)
            if done < total:  # a signal, or the disk is now full
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
        """Make the creation and removal of files in the folder durable."""
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def commit(self, database: sqlite3.Connection) -> None:
        database.execute("COMMIT")

    def checkpoint(self, database: sqlite3.Connection) -> None:
        """Copy the write-ahead log into the database, and start the log again."""
        database.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()

    def room(self, folder: Path) -> int:
        """Free bytes."""
        return shutil.disk_usage(folder).free


def is_full(error: Exception) -> bool:
    """Whether the error says that the disk is full, which may be temporary."""
    if isinstance(error, sqlite3.OperationalError):
        return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in _NO_ROOM


# ------------------------------------------------------------------------------------------
# A lock for one process at a time: it names its holder, and is released however that dies.


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a store, and since when (local time, for people)."""

    pid: int
    host: str
    since: str


class StoreLock:
    """Holds a folder's lock file until closed. Raises StoreInUse, which names the holder; OSError.

    The kernel holds the lock for the open file (`flock`), so it is free as soon as the process is
    gone; the content of the file is only for people.
    """

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "lock").open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._read()
            self._file.close()
            raise StoreInUse(
                f"store {folder} is in use by {holder}; stop that process, or use another folder"
            ) from None
        self._write()

    def close(self) -> None:
        self._file.close()

    def _read(self) -> str:
        self._file.seek(0)
        try:
            holder = msgspec.json.decode(self._file.read(), type=Holder)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return "another process"  # which has not written its name yet
        return f"process {holder.pid} on {holder.host} since {holder.since}"

    def _write(self) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._file.truncate(0)
        self._file.write(msgspec.json.encode(Holder(os.getpid(), socket.gethostname(), since)))
        self._file.flush()
