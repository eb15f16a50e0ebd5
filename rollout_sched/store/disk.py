"""Where a store puts data on the disk, in one place so that tests can replace it; and the two small
files beside its database: the lock, and the mark that says how far the store has come."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import sqlite3
import time
import zlib
from pathlib import Path
from typing import Annotated

import msgspec

from rollout_sched.core.model.records import Count, Serial
from rollout_sched.store.errors import StoreInUse


class Disk:
    """The disk of the machine. Every call may raise OSError or sqlite3.Error."""

    def commit(self, database: sqlite3.Connection) -> None:
        database.execute("COMMIT")

    def checkpoint(self, database: sqlite3.Connection) -> None:
        """Copy the log into the database."""
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def sync(self, path: Path) -> None:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def write_mark(self, file: int, record: bytes, *, synced: bool) -> None:
        os.pwrite(file, record, 0)
        if synced:
            os.fsync(file)

    def boot(self) -> str:
        """A name of the machine's present run, from its start to its end; "": unknown."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""

    def room(self, folder: Path) -> int:
        """Free bytes."""
        return shutil.disk_usage(folder).free


def is_full(error: Exception) -> bool:
    """Whether the error says that the disk is full, which may be temporary."""
    if not isinstance(error, sqlite3.OperationalError):
        return False
    return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL


# ------------------------------------------------------------------------------------------
# A mark beside the database. SQLite takes the first damaged page of its log for the log's end, and
# cannot know that there was more.

#: Most of a transaction's number, and of its Unix time in seconds: the year 5138.
MAX_NUMBER, MAX_TIME = 2**52, 1e11

#: Bytes of a mark: less than a sector, so it is never written by half.
MARK_BYTES = 256


class Mark(msgspec.Struct, frozen=True):
    """What the database must hold.

    written  number of the last transaction: the database has it as long as the machine runs
    synced   number of the last one that a loss of power leaves; 0: it may cost any
    at       Unix time of the last transaction
    boot     the machine's run, from `Disk.boot`
    epoch    of the store
    """

    written: Serial = 0
    synced: Serial = 0
    at: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME)] = 0.0
    boot: str = ""
    epoch: Serial = 0


class MarkFile:
    """The mark of a store, written over after each transaction. Raises OSError."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._disk = disk
        file = os.open(folder / "mark", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._file = os.fdopen(file, "r+b", buffering=0)
        disk.sync(folder)  # the file's name

    def read(self) -> Mark | None:
        """None: it is damaged, or was never written."""
        crc, _, mark = os.pread(self._file.fileno(), MARK_BYTES, 0).rstrip().partition(b" ")
        if crc != b"%08x" % zlib.crc32(mark):
            return None
        try:
            return msgspec.json.decode(mark, type=Mark)
        except msgspec.DecodeError:  # no text at all has a checksum, too
            return None

    def write(self, mark: Mark, *, synced: bool) -> None:
        text = msgspec.json.encode(mark)
        record = b"%08x %s" % (zlib.crc32(text), text)
        record = record.ljust(MARK_BYTES - 1) + b"\n"
        self._disk.write_mark(self._file.fileno(), record, synced=synced)

    def close(self) -> None:
        self._file.close()


# ------------------------------------------------------------------------------------------
# A lock for one process at a time: it names its holder, and is released however that dies.


#: Most bytes of a lock file.
_LOCK_BYTES = 1024


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a store, and since when (local time), for people. Anybody may have
    written the file, so what it says must look like that."""

    pid: Count
    host: Annotated[str, msgspec.Meta(pattern=r"^[\w.:-]{1,255}$")]
    since: Annotated[str, msgspec.Meta(pattern=r"^[\d :-]{19}$")]


class StoreLock:
    """Holds a folder and its lock file until closed. Raises StoreInUse, which names the holder;
    OSError.

    The kernel holds the locks for the open files (`flock`), so they are free as soon as the process
    is gone. The folder's remains if the file is removed; the file's is one that processes of other
    machines see, if the file system has such locks.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        self._file = (folder / "lock").open("a+b")
        try:
            for held in (self._folder, self._file):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._read()
            self.close()
            raise StoreInUse(
                f"store {folder} is in use by {holder}; stop that process, or use another folder"
            ) from None
        self._write()

    def close(self) -> None:
        self._file.close()
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def _read(self) -> str:
        self._file.seek(0)
        try:
            holder = msgspec.json.decode(self._file.read(_LOCK_BYTES), type=Holder)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return "a process that its lock file does not name"
        return f"process {holder.pid} on {holder.host} since {holder.since}"

    def _write(self) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._file.truncate(0)
        self._file.write(msgspec.json.encode(Holder(os.getpid(), socket.gethostname(), since)))
        self._file.flush()
