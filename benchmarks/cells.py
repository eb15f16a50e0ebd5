"""Run many replays in parallel processes; each result is cached until the sources change.

A cell is one policy on one trace in one scenario. `run_all` returns the run of each. After an
interruption it continues where it stopped, because every run is a file of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path

import msgspec

import rollout_sched
from benchmarks.synthetic import synthetic
from rollout_sched.config import load_policy
from rollout_sched.process import whole_file
from rollout_sched.simulators.replay import Scenario, load_scenario
from rollout_sched.simulators.replay.runs import Run, run_policy
from rollout_sched.simulators.traces import Trace, read
from rollout_sched.simulators.traces.model import resampled

#: The files that a run depends on.
SOURCES = (
    "core",
    "metrics",
    "policies",
    "simulators/instance",
    "simulators/replay",
    "simulators/traces",
)
ROOT = Path(rollout_sched.__file__).parent


class Lengths(msgspec.Struct, frozen=True):
    """A synthetic workload as made by `benchmarks.synthetic`; tokens."""

    groups: int
    samples: int
    median: float
    sigma_between: float
    sigma_within: float
    cap: int

    def drawn(self, draw: int) -> Trace:
        return synthetic(
            self.groups,
            self.samples,
            median=self.median,
            sigma_between=self.sigma_between,
            sigma_within=self.sigma_within,
            cap=self.cap,
            seed=draw,
        )


class Cell(msgspec.Struct, frozen=True):
    """`policy` and `scenario`: shipped names or TOML files; `trace`: a name, or synthetic lengths.

    A value of 0 is taken from the scenario or the trace. Draw 0 of a trace is the trace itself;
    other draws are as many of its prompts drawn with replacement. Synthetic lengths are made again
    for each draw.
    """

    policy: str
    trace: str | Lengths
    scenario: str
    steps: int = 0
    epochs: int = 1
    prompts_per_step: int = 0
    samples_per_prompt: int = 0
    draw: int = 0

    @property
    def world(self) -> Scenario:
        """The scenario with this job."""
        return load_scenario(self.scenario).with_job(msgspec.structs.asdict(self))

    def run(self) -> Run:
        return run_policy(
            load_policy(self.policy),
            trace_of(self.trace, self.draw),
            self.world,
            steps=self.steps,
            seed=self.draw,
        )


@lru_cache(maxsize=4)
def trace_of(trace: str | Lengths, draw: int) -> Trace:
    if not isinstance(trace, str):
        return trace.drawn(draw)
    recorded = read(trace)
    return resampled(recorded, draw - 1) if draw else recorded


def run_all(cells: Sequence[Cell], folder: Path, jobs: int) -> dict[Cell, Run]:
    """The run of every cell: read from the folder if it is there, else made and saved there."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {cell: folder / f"{_key(cell)}.json" for cell in cells}
    missing = [cell for cell in files if not files[cell].exists()]
    began = time.monotonic()
    for done, (cell, seconds) in enumerate(_run_in_processes(missing, files, jobs), 1):
        trace = cell.trace if isinstance(cell.trace, str) else "synthetic"
        print(
            f"{done}/{len(missing)} {trace} {Path(cell.scenario).stem} {Path(cell.policy).stem}: "
            f"{seconds:.1f} s, {time.monotonic() - began:,.0f} s so far",
            file=sys.stderr,
            flush=True,
        )
    return {cell: msgspec.json.decode(file.read_bytes(), type=Run) for cell, file in files.items()}


def _run_in_processes(
    cells: Sequence[Cell], files: dict[Cell, Path], jobs: int
) -> Iterator[tuple[Cell, float]]:
    with ProcessPoolExecutor(jobs) as pool:
        cell_of = {pool.submit(_run_and_keep, cell, files[cell]): cell for cell in cells}
        for future in as_completed(cell_of):
            yield cell_of[future], future.result()


def _run_and_keep(cell: Cell, file: Path) -> float:
    began = time.monotonic()
    run = cell.run()
    with whole_file(file) as out:
        out.write(msgspec.json.encode(run))
    return time.monotonic() - began


def _key(cell: Cell) -> str:
    """The key of a cell: a hash of the cell, the text of its files and the sources that ran it."""
    digest = hashlib.blake2b(msgspec.json.encode(cell), digest_size=12)
    for name in (cell.policy, cell.scenario):
        if Path(name).is_file():
            digest.update(Path(name).read_bytes())
    digest.update(_sources())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _sources() -> bytes:
    digest = hashlib.blake2b()
    for room in SOURCES:
        for file in sorted((ROOT / room).rglob("*")):
            if file.suffix in (".py", ".toml", ".gz"):
                digest.update(file.read_bytes())
    return digest.digest()


def command(module: str, options: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """The command that makes a page: make, or the call with the options that differ."""
    chosen = [
        f"--{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in vars(options).items()
        if name not in ("jobs", "kept", "out") and value != parser.get_default(name)
    ]
    target = "reproduction" if module == "reproduce" else module
    return f"python -m benchmarks.{module} {' '.join(chosen)}" if chosen else f"make {target}"


def default_jobs() -> int:
    return min(2, os.cpu_count() or 1)
