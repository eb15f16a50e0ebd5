"""What a stranger does with the README, in order: clone, install, each of its commands as printed.

`python -m tests.newcomer.clone`. `make demo` and `make test` are steps of CI by themselves, and the
gateway's command runs in `test_pages`; the loop is `tests/test_docs.py`'s.
"""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Commands of the README that run elsewhere, by how they begin.
ELSEWHERE = ("make ", "rollout-sched serve ")

#: What a user has: a dump of rollouts, under the name of the README.
TRACE = "lrm_math_open.jsonl.gz"

#: The beginning of a command -> what its output has to show.
SHOWS = {"pip": "", "rollout-sched replay": "Pareto frontier"}


def main() -> None:
    shown = re.findall(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    lines = [line.partition("#")[0].strip() for block in shown for line in block.splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        clone, venv = Path(folder, "clone"), Path(folder, "venv")
        timed(["git", "clone", "-q", str(ROOT), str(clone)], clone.parent)
        timed([sys.executable, "-m", "venv", str(venv)], clone.parent)
        os.environ["PATH"] = f"{venv}/bin:{os.environ['PATH']}"
        traces = clone / "simulators/traces/data"
        (clone / "my_rollouts.jsonl").write_bytes(gzip.decompress((traces / TRACE).read_bytes()))
        for line in (line for line in lines if not line.startswith(ELSEWHERE)):
            wanted = next(what for begin, what in SHOWS.items() if line.startswith(begin))
            assert wanted in timed(line.split(), clone), line


def timed(command: list[str], folder: Path) -> str:
    """What a command prints; CalledProcessError if it fails."""
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    print(f"{time.monotonic() - began:6.1f} s  {' '.join(command)}", flush=True)
    return done.stdout


if __name__ == "__main__":
    main()
