"""What was installed works from wherever it is run: `python installed.py [--compiled]`.

For the environment of the Python that runs it; it needs nothing of this checkout.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

POLICIES = ("round_robin_sync", "tail_batching")

#: A command line -> what it has to say.
SAYS = {
    "--version": (version("rollout-sched"),),
    "policy list": POLICIES,
    f"replay lrm_math_open --policy {POLICIES[0]} --policy {POLICIES[1]}": POLICIES,
    f"demo --policy {POLICIES[0]} --speed 60": (POLICIES[0],),
}


def main(compiled: bool) -> int:
    command = Path(sys.executable).parent / "rollout-sched"
    with tempfile.TemporaryDirectory() as folder:  # no module of a checkout beside it
        for line, wanted in SAYS.items():
            done = subprocess.run(
                [command, *line.split()], cwd=folder, capture_output=True, text=True, check=False
            )
            missing = [words for words in wanted if words not in done.stdout]
            if done.returncode or missing:
                print(f"rollout-sched {line}: {done.returncode}, without {missing}")
                print(done.stdout, done.stderr, sep="\n")
                return 1
    sys.path.remove(str(Path(__file__).parent))
    scheduler = str(importlib.import_module("rollout_sched.core.scheduler").__file__)
    if compiled == scheduler.endswith(".py"):
        print(f"{scheduler} is {'not ' * compiled}compiled")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main("--compiled" in sys.argv))
