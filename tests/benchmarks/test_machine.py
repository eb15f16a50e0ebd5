"""Who used the machine, and how long we wait for others."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from benchmarks.live import machine
from benchmarks.live.machine import CORES, Instant, Patience

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SPIN = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"


def test_a_session_counts_with_its_children():
    shell = f"{sys.executable} -c '{SPIN}'"
    with subprocess.Popen(
        ["sh", "-c", f"{shell}; true"],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        used = machine.usage([process.pid])
        assert 0.25 <= used.cpu_s < 5
        assert used.rss_bytes > 2**20
        process.communicate(b"\n")
    assert machine.usage([process.pid]) == machine.Usage()


def test_foreign_is_what_is_neither_idle_nor_ours():
    before = Instant(wall_s=10.0, busy_s=100.0, own_s=5.0)
    after = Instant(wall_s=20.0, busy_s=100.0 + 6 * CORES, own_s=5.0 + 3 * CORES)
    assert before.busy_share(after) == pytest.approx(0.6)
    assert before.foreign_share(after) == pytest.approx(0.3)
    assert before.foreign_share(after, also_ours_s=1.0 * CORES) == pytest.approx(0.2)
    assert before.foreign_share(after, also_ours_s=99.0 * CORES) == 0


def test_our_own_work_is_not_foreign():
    before = machine.instant()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    after = machine.instant()
    assert after.own_s - before.own_s >= 0.2


def test_patience_ends_and_is_not_spent_on_quiet(monkeypatch):
    readings = iter(
        [
            Instant(0, 0, 0),
            Instant(1, CORES, 0),  # all in use by others
            Instant(1, CORES, 0),
            Instant(2, CORES, 0),  # quiet
        ]
    )
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(machine, "instant", lambda sessions: next(readings))
    monkeypatch.setattr(machine.time, "sleep", sleep)
    monkeypatch.setattr(machine.time, "monotonic", lambda: now)
    patience = Patience(10.0)
    patience.wait_until_quiet([], limit=0.1, max_s=20)
    assert now == 2
    assert patience.left_s == 9


def test_without_patience_one_second_is_given(monkeypatch):
    busy = iter([Instant(0, 0, 0), Instant(1, CORES, 0)])
    monkeypatch.setattr(machine, "instant", lambda sessions: next(busy))
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    Patience(0.0).wait_until_quiet([], limit=0.1, max_s=20)
    assert next(busy, None) is None
