"""The ways to the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import subprocess
import sys

import pytest

from rollout_sched.store.disk import Disk, StoreLock, is_full
from rollout_sched.store.errors import StoreInUse


def test_tells_a_full_disk_from_a_broken_one(tmp_path):
    assert not is_full(OSError(errno.EIO, "broken"))
    assert not is_full(ValueError())
    database = sqlite3.connect(tmp_path / "d", isolation_level=None)
    database.execute("PRAGMA max_page_count = 1")
    with pytest.raises(sqlite3.OperationalError) as told:
        database.execute("CREATE TABLE t AS SELECT zeroblob(100000)")
    assert is_full(told.value)
    database.close()


def test_says_how_much_room_there_is(tmp_path):
    assert Disk().room(tmp_path) > 0


# -- The lock of a store --


def test_the_second_is_told_who_holds_it(tmp_path):
    lock = StoreLock(tmp_path)
    with pytest.raises(StoreInUse, match=rf"in use by process {os.getpid()} on .* since \d{{4}}-"):
        StoreLock(tmp_path)
    lock.close()
    StoreLock(tmp_path).close()


def test_death_releases_it(tmp_path):
    program = (
        "import os, pathlib, sys\n"
        "from rollout_sched.store.disk import StoreLock\n"
        "lock = StoreLock(pathlib.Path(sys.argv[1]))\n"
        "print('held', flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    died = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert died.stdout == "held\n"
    assert died.returncode == -9
    StoreLock(tmp_path).close()


@pytest.mark.parametrize(
    "text",
    [
        None,  # it is removed
        b"",
        b"{",
        b"\xff",
        b"7",
        b'{"pid": 1, "host": "\\u001b[2J", "since": "2026-01-01 00:00:00"}',
        b'{"pid": 1, "host": "h", "since": "' + b"2" * 5000,
    ],
)
def test_a_lock_does_not_depend_on_what_its_file_says(tmp_path, text):
    lock = StoreLock(tmp_path)
    (tmp_path / "lock").unlink()
    if text is not None:
        (tmp_path / "lock").write_bytes(text)
    for _ in range(2):
        with pytest.raises(StoreInUse, match="in use by a process that its lock file does not na"):
            StoreLock(tmp_path)
    lock.close()
    lock = StoreLock(tmp_path)
    with pytest.raises(StoreInUse, match=f"in use by process {os.getpid()} on "):
        StoreLock(tmp_path)
    lock.close()


def test_a_lock_file_that_another_machine_holds_is_enough(tmp_path):
    """Its lock of the folder is not seen here."""
    other = b'{"pid":7,"host":"node-3","since":"2026-01-01 00:00:00"}'
    (tmp_path / "lock").write_bytes(other)
    with (tmp_path / "lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreInUse, match="process 7 on node-3 since 2026-01-01 00:00:00"):
            StoreLock(tmp_path)
