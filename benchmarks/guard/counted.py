"""Runs a `rollout-sched` command under callgrind: `python counted.py MARKS HOW COMMAND...`.

HOW is "again": the command runs several times, and each run but the first is counted. Or "asked":
each line on stdin begins or ends a count, and is answered by an empty line on stdout.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import cycle

from rollout_sched.cli import main

RUNS = 3


def again(marks: ctypes.CDLL, command: Sequence[str]) -> int:
    """Count runs that find every module imported."""
    failed = main(command)
    for _ in range(RUNS):
        marks.begin()
        failed = failed or main(command)
        marks.end()
    return failed


def asked(marks: ctypes.CDLL, command: Sequence[str]) -> int:
    """Count what runs while whoever started this process wants it to."""
    threading.Thread(target=_listen, args=(marks.begin, marks.end), daemon=True).start()
    return main(command)


def _listen(*marks: Callable[[], object]) -> None:
    for mark in cycle(marks):
        if not sys.stdin.readline():
            return
        mark()
        os.write(1, b"\n")


if __name__ == "__main__":
    _, library, how, *words = sys.argv
    sys.exit({"again": again, "asked": asked}[how](ctypes.CDLL(library), words))
