"""Observe the machine during a benchmark: CPU and memory of our processes, and others' load.

Linux only: everything is read from /proc. A program under test may have threads and children. It is
started as the leader of its own session and counts as all processes of that session.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class Usage:
    """CPU seconds used so far and bytes of memory now, of all processes of some sessions."""

    cpu_s: float = 0.0
    rss_bytes: int = 0


def usage(sessions: Iterable[int]) -> Usage:
    """What the running processes of these sessions have used."""
    wanted = set(sessions)
    ticks = pages = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(entry)
            if fields and int(fields[3]) in wanted:
                ticks += int(fields[11]) + int(fields[12])
                pages += int(fields[21])
    return Usage(ticks / TICKS_PER_S, pages * PAGE_BYTES)


def _stat(process: Path) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may contain blanks; [] if it ended."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def busy_s() -> float:
    """CPU seconds since boot that all cores were not idle, including time stolen by a host."""
    with open("/proc/stat") as file:
        fields = [int(field) for field in file.readline().split()[1:9]]
    idle, waiting_for_disk = fields[3], fields[4]
    return (sum(fields) - idle - waiting_for_disk) / TICKS_PER_S


@dataclass(frozen=True)
class Instant:
    """A reading of the clocks; the difference of two shows who used the machine in between."""

    wall_s: float
    busy_s: float
    own_s: float

    def busy_share(self, later: Instant) -> float:
        """The share of the machine that was in use, 0 to 1."""
        return (later.busy_s - self.busy_s) / self._capacity(later)

    def foreign_share(self, later: Instant, also_ours_s: float = 0.0) -> float:
        """The share of the machine that others used. `also_ours_s`: CPU of our ended processes."""
        ours = later.own_s - self.own_s + also_ours_s
        return max(0.0, later.busy_s - self.busy_s - ours) / self._capacity(later)

    def _capacity(self, later: Instant) -> float:
        return max(later.wall_s - self.wall_s, 1e-3) * CORES


def instant(sessions: Iterable[int] = ()) -> Instant:
    """A reading now. Ours are this process and the given sessions."""
    return Instant(time.monotonic(), busy_s(), time.process_time() + usage(sessions).cpu_s)


class Patience:
    """Seconds for waiting for other load and for repeated measurements, in a whole run."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds

    def spend(self, since: Instant) -> None:
        self.left_s -= time.monotonic() - since.wall_s

    def wait_until_quiet(self, sessions: Iterable[int], limit: float, max_s: float) -> None:
        """Return when others used less than `limit` of the machine for a second.

        Or after `max_s` seconds, or when patience ends; it always observes one second.
        """
        sessions = list(sessions)
        give_up = time.monotonic() + min(max_s, self.left_s)
        while True:
            before = instant(sessions)
            time.sleep(1.0)
            if before.foreign_share(instant(sessions)) < limit:
                return
            self.spend(before)
            if time.monotonic() >= give_up:
                return
