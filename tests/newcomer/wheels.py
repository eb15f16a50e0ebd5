"""Installs each distribution of a folder by its name, each into an environment of its own, and runs
it there: `wheels.py dist python3.11 python3.12 ...`.

A compiled wheel is for the Python that it names; the others are tried with the first.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

INSTALLED = Path(__file__).parent / "installed.py"
NAME = re.compile(
    r"rollout_sched-(?P<version>[^-]+?)(?:-cp3(?P<minor>\d+)-.*)?(?:-py3.*)?(\.whl|\.tar\.gz)"
)


def main(folder: Path, pythons: list[str]) -> int:
    minors = {_minor(python): python for python in pythons}
    failed = 0
    for file in sorted(folder.iterdir()):
        named = NAME.fullmatch(file.name)
        if named is None:
            print(f"{file.name}: not ours")
            failed = 1
        elif (python := minors.get(named["minor"]) if named["minor"] else pythons[0]) is None:
            print(f"{file.name}: not tried, there is no Python 3.{named['minor']}")
        else:
            began = time.monotonic()
            works = tried(file, named["version"], python, compiled=bool(named["minor"]))
            failed |= not works
            took = time.monotonic() - began
            print(f"{file.name}: {'works' if works else 'FAILED'} ({took:.0f} s)", flush=True)
    return failed


def tried(file: Path, version: str, python: str, compiled: bool) -> bool:
    """Whether a user who finds only this file in an index can install and run it."""
    with tempfile.TemporaryDirectory() as scratch:
        index, venv = Path(scratch, "index"), Path(scratch, "venv")
        index.mkdir()
        shutil.copy(file, index)
        own = venv / "bin/python"
        install = [own, "-m", "pip", "install", "-q", "--find-links", index]
        return all(
            subprocess.run(command, check=False).returncode == 0
            for command in (
                [python, "-m", "venv", venv],
                [*install, f"rollout-sched=={version}"],
                [own, INSTALLED, *["--compiled"] * compiled],
            )
        )


def _minor(python: str) -> str:
    said = subprocess.run([python, "--version"], capture_output=True, text=True, check=True)
    return said.stdout.split(".")[1]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
