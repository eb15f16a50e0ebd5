"""`python -m rollout_sched` is the command."""

from __future__ import annotations

import subprocess
import sys


def test_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "rollout_sched", "policy", "list"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "tail_batching" in said


def test_exit_status_is_passed_on() -> None:
    command = [sys.executable, "-m", "rollout_sched", "check", "nothing_of_that_name"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
