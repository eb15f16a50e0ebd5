"""The lock of a store."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rollout_sched.store.disk import StoreLock
from rollout_sched.store.errors import StoreInUse


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


def test_a_holder_that_has_not_written_yet_is_somebody(tmp_path):
    lock = StoreLock(tmp_path)
    (tmp_path / "lock").write_bytes(b"{")
    with pytest.raises(StoreInUse, match="in use by another process"):
        StoreLock(tmp_path)
    lock.close()
