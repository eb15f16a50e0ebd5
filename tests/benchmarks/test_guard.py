"""The guard of instructions: what it compares with, what fails, and what a count is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.guard import __main__ as guard


def test_more_work_than_the_limit_fails() -> None:
    assert guard.report({"replay": (100.0, 103.0), "short64": (100.0, 50.0)})
    assert not guard.report({"replay": (100.0, 100.0), "short64": (100.0, 103.5)})


def test_the_baseline_is_a_commit_of_this_repository() -> None:
    git = ["git", "-C", str(guard.TREE), "cat-file", "-t", guard.baseline()]
    if not (guard.TREE / ".git").exists():
        pytest.skip("not a checkout")
    assert subprocess.run(git, capture_output=True, text=True, check=True).stdout == "commit\n"


@pytest.mark.real_time
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
def test_a_count_holds_what_is_between_two_marks(tmp_path: Path) -> None:
    build = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / "marks.so")]
    subprocess.run([*build, str(guard.HERE / "marks.c")], check=True)
    program = tmp_path / "program.py"
    program.write_text(
        "import ctypes, sys\n"
        "marks = ctypes.CDLL(sys.argv[1])\n"
        "for times in (1000, 3000):\n"
        "    marks.begin()\n"
        "    for number in range(times): hash(number)\n"
        "    marks.end()\n"
    )
    out = tmp_path / "count"
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
    command = [*valgrind, sys.executable, "-S", str(program), str(tmp_path / "marks.so")]
    subprocess.run(command, check=True, capture_output=True)
    few, many = guard.counts_of(out)
    assert 2 * few < many < 4 * few
