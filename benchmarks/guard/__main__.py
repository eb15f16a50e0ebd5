"""Whether this tree does more work than a commit before it: `python -m benchmarks.guard`.

Both trees do the same, interpreted, under valgrind's callgrind, which counts instructions between
two marks: a replay, and a gateway with requests of three shapes, one at a time, before a bare
instance. A count hardly depends on other load, as a time does, so 3 % more than before fail. It
says nothing of memory, and little of the compiled build.

Needs Linux, a C compiler and valgrind with its headers (`apt-get install valgrind`). Exit code 1 if
the tree does more, 2 if it cannot be told.
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.live.processes import LOOPBACK, Processes, StartError, free_port, url
from benchmarks.live.request_shapes import FRESH, PATH, SHAPES

HERE = Path(__file__).parent
TREE = HERE.parents[1]

#: Names the commit to compare with as long as there is no release.
BASELINE = HERE / "baseline"

#: How much more work than before is too much.
LIMIT = 1.03

#: Requests of a batch by shape. The median of some batches counts, as timers run in some of them.
BATCH = {"short64": 20, "rltok16": 4, "stream256": 1}
BATCHES = 5

REPLAY = ("replay", "lrm_math_open", "--policy", "best_async", "--steps", "1", "--jobs", "1")

_TOTALS = re.compile(r"^totals: (\d+)$", re.MULTILINE)

Counts = Mapping[str, float]


class Counted:
    """A command of one tree under callgrind."""

    def __init__(self, tree: Path, folder: Path, how: str, command: Sequence[str]) -> None:
        folder.mkdir(parents=True)
        self._out = folder / "count"
        self._log = folder / "log"
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        child = [sys.executable, str(HERE / "counted.py"), str(folder.parents[1] / "marks.so"), how]
        self.process = subprocess.Popen(
            [*valgrind, f"--callgrind-out-file={self._out}", *child, *command],
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("wb"),
        )

    def mark(self) -> None:
        """Begin or end a count."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        while self.process.stdout.readline() != b"\n":
            if self.process.poll() is not None:
                raise StartError(self._log.read_text("utf-8", "replace")[-1500:])

    def end(self) -> list[int]:
        """Instructions of each count, after the process has ended."""
        self.process.communicate()
        counts = counts_of(self._out)
        if not counts:
            raise StartError(self._log.read_text("utf-8", "replace")[-1500:])
        return counts


def counts_of(out: Path) -> list[int]:
    """What callgrind wrote to files of this name, in order."""
    dumps = sorted(out.parent.glob(f"{out.name}.*"), key=lambda dump: int(dump.suffix[1:]))
    found = [_TOTALS.search(dump.read_text()) for dump in dumps]
    return [int(totals[1]) for totals in found if totals is not None and int(totals[1])]


def of_replay(tree: Path, folder: Path) -> Counts:
    """Instructions of a small replay, with what it prints."""
    counts = Counted(tree, folder / "replay", "again", REPLAY).end()
    return {"replay": statistics.median(counts)}


def of_gateway(tree: Path, folder: Path, instance: int) -> Counts:
    """Instructions of a request, by shape."""
    port = free_port()
    serve = ("serve", "--policy", "dplb", "--instance", url(instance), "--port", str(port))
    gateway = Counted(tree, folder / "gateway", "asked", (*serve, "--poll-s", "600"))
    try:
        _ask(_connected(port, gateway), "short64", 10)
        for shape, requests in BATCH.items():
            client = http.client.HTTPConnection(LOOPBACK, port, timeout=120)
            _ask(client, shape, 1)
            for _ in range(BATCHES):
                gateway.mark()
                _ask(client, shape, requests)
                gateway.mark()
            client.close()
    finally:
        gateway.process.terminate()
    counts = gateway.end()
    batches = {shape: counts[i * BATCHES :][:BATCHES] for i, shape in enumerate(BATCH)}
    return {shape: statistics.median(batches[shape]) / BATCH[shape] for shape in BATCH}


def _connected(port: int, gateway: Counted) -> http.client.HTTPConnection:
    give_up = time.monotonic() + 240
    while gateway.process.poll() is None and time.monotonic() < give_up:
        try:
            client = http.client.HTTPConnection(LOOPBACK, port, timeout=120)
            _ask(client, "short64", 1)
            return client
        except (OSError, AssertionError):
            time.sleep(0.3)
    gateway.process.kill()
    raise StartError("a gateway under valgrind did not answer")


def _ask(client: http.client.HTTPConnection, shape: str, requests: int) -> None:
    for number in range(requests):
        body = SHAPES[shape].body.replace(FRESH, f"{number:08d}")
        client.request("POST", PATH, body, {"Content-Type": "application/json"})
        answer = client.getresponse()
        answer.read()
        assert answer.status == 200, answer.status


def count(tree: Path, folder: Path, instance: int) -> Counts:
    return {**of_replay(tree, folder), **of_gateway(tree, folder, instance)}


def compare(commit: str) -> dict[str, tuple[float, float]]:
    """(before, now) of every count. Both trees run at the same time."""
    with Processes() as processes:
        folder, before = processes.folder, processes.folder / "tree"
        run = ["git", "-C", str(TREE), "worktree"]
        subprocess.run([*run, "add", "-q", "--detach", str(before), commit], check=True)
        try:
            build = ["cc", "-O2", "-shared", "-fPIC", "-o", str(folder / "marks.so")]
            subprocess.run([*build, str(HERE / "marks.c")], check=True)
            program, port = processes.build(TREE / "benchmarks/live/bare_instance.c"), free_port()
            processes.start("instance", [str(program), str(port)], None)
            with ThreadPoolExecutor(2) as pool:
                tasks = [
                    pool.submit(count, tree, folder / name, port)
                    for name, tree in (("before", before), ("now", TREE))
                ]
                old, new = [task.result() for task in tasks]
        finally:
            subprocess.run([*run, "remove", "--force", str(before)], check=True)
    return {name: (old[name], new[name]) for name in old}


def baseline() -> str:
    """The last release, or the commit that the file names."""
    describe = ["git", "-C", str(TREE), "describe", "--tags", "--abbrev=0"]
    told = subprocess.run(describe, capture_output=True, text=True, check=False)
    return told.stdout.strip() or BASELINE.read_text().strip()


def report(counts: Mapping[str, tuple[float, float]]) -> bool:
    """Print the counts; whether all are within the limit."""
    print(f"{'thousand instructions of':26}{'before':>12}{'now':>12}   ratio")
    for name, (old, new) in counts.items():
        verdict = "" if new <= old * LIMIT else f"   MISSED: at most {LIMIT}"
        print(f"{name:26}{old / 1e3:12,.0f}{new / 1e3:12,.0f}   {new / old:.3f}{verdict}")
    return all(new <= old * LIMIT for old, new in counts.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--against", help="a commit; default: the last release, or that of baseline"
    )
    options = parser.parse_args(arguments)
    commit = options.against or baseline()
    print(f"against {commit}")
    try:
        return 0 if report(compare(commit)) else 1
    except (StartError, OSError, subprocess.CalledProcessError) as error:
        print(f"nothing could be told: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
