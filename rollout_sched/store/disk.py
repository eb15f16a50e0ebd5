"""Where a store puts data on the disk, in one place so that tests can replace it; and its lock."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import sqlite3
import time
from pathlib import Path

import msgspec

from rollout_sched.store.errors import StoreInUse


class Disk:
    """The disk of the machine. Every call may raise OSError or sqlite3.Error."""

    def commit(self, database: sqlite3.Connection) -> None:
        database.execute("COMMIT")

    def checkpoint(self, database: sqlite3.Connection) -> None:
        """Copy the log into the database."""
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def room(self, folder: Path) -> int:
        """Free bytes."""
        return shutil.disk_usage(folder).free


def is_full(error: Exception) -> bool:
    """Whether the error says that the disk is full, which may be temporary."""
    if not isinstance(error, sqlite3.OperationalError):
        return False
    return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL


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
