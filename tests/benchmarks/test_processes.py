"""Whatever happens to a bench, nothing it started stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pins and groups processes")

BENCH = """
import signal, sys, time
from benchmarks.live.processes import Processes
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
with Processes() as processes:
    process = processes.start("sleeper", ["sleep", "600"], None)
    print(process.pid, processes.folder, flush=True)
    if sys.argv[1] == "raise":
        raise RuntimeError("the bench failed")
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["raise", "terminate", "interrupt"])
def test_all_is_stopped_and_cleared_away(how):
    with subprocess.Popen(
        [sys.executable, "-c", BENCH, how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as bench:
        pid, folder = bench.stdout.readline().split()
        if how != "raise":
            bench.send_signal(signal.SIGTERM if how == "terminate" else signal.SIGINT)
        assert bench.wait(30) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    assert not os.path.exists(folder)
