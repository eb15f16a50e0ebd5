"""Runs a target: first its corpus, then inputs from the seed; shrinks failing inputs."""

from __future__ import annotations

import logging
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fuzz.bounds import bounded, check_growth, memory
from tests.fuzz.corpus import kept
from tests.fuzz.laws import Broken
from tests.fuzz.target import Target, next_input

#: After so many inputs the cost of a repeated part is measured, which takes as long as many inputs.
GROWTH_EVERY = 150

#: Most tries, and seconds, for shrinking one input.
SHRINK_TRIES = 1500
SHRINK_S = 5.0


@dataclass(frozen=True)
class Failure:
    """An input that breaks a law; with `part`, the repetition of that part breaks it."""

    law: str
    told: str
    data: bytes
    part: tuple[int, int] | None = None

    def command(self, name: str) -> str:
        repeat = f" --repeat {self.part[0]}:{self.part[1]}" if self.part else ""
        return f"python -m tests.fuzz --target {name} --input {self.data.hex() or '-'}{repeat}"


@dataclass
class Report:
    """The result of a run, with at most one failure for each law."""

    name: str
    inputs: int = 0
    seconds: float = 0.0
    grown: int = 0  # bytes by which the process has grown in the second half
    failures: dict[str, Failure] = field(default_factory=dict)


def run(target: Target, seed: int, *, inputs: int = 0, seconds: float = 0.0) -> Report:
    """Run the corpus, including its files, and then the given number of inputs, or seconds.

    The same seed makes the same inputs, whatever the time.
    """
    report = Report(target.name)
    rng = random.Random(f"{seed} {target.name}")
    start = time.monotonic()
    logging.disable(logging.CRITICAL)
    try:
        for data in (*target.corpus, *kept(target.name)):
            _try(target, data, report)
        half = 0
        while report.inputs < inputs or (spent := time.monotonic() - start) < seconds:
            if not half and (2 * report.inputs > inputs if inputs else 2 * spent > seconds):
                half = memory()
            data = next_input(target, rng)
            part = _part(data, rng)
            _try(target, data, report)
            if part is not None and report.inputs % GROWTH_EVERY == 0:
                _try(target, data, report, part)
    finally:
        logging.disable(logging.NOTSET)
    report.seconds = time.monotonic() - start
    report.grown = memory() - half if half else 0
    return report


def failure(target: Target, data: bytes, part: tuple[int, int] | None = None) -> Failure | None:
    """The law that an input breaks, or None."""
    try:
        if part is None:
            bounded(target, data)
        else:
            check_growth(target, data, *part)
    except Broken as broken:
        return Failure(broken.law, str(broken), data, part)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        law = f"only errors for the caller are raised, not {type(error).__name__}"
        return Failure(f"{law} in {where.name}", f"{law}: {error} ({where.filename})", data, part)
    return None


def _part(data: bytes, rng: random.Random) -> tuple[int, int] | None:
    if not data:
        return None
    start = rng.randrange(len(data))
    return start, min(len(data), start + 1 + int(rng.expovariate(1 / 12)))


def _try(target: Target, data: bytes, report: Report, part: tuple[int, int] | None = None) -> None:
    report.inputs += part is None
    found = failure(target, data, part)
    if found is None or found.law in report.failures:
        return
    if part is None:

        def same(shorter: bytes) -> bool:
            again = failure(target, shorter)
            return again is not None and again.law == found.law

        found = failure(target, shrunk(data, same)) or found
    report.failures[found.law] = found


def shrunk(data: bytes, fails: Callable[[bytes], bool]) -> bytes:
    """A shorter failing input from which no single piece can be removed."""
    tries, give_up = 0, time.monotonic() + SHRINK_S
    size = max(1, len(data) // 2)
    while size:
        at, smaller = 0, False
        while at < len(data):
            if tries >= SHRINK_TRIES or time.monotonic() > give_up:
                return data
            tries += 1
            without = data[:at] + data[at + size :]
            if fails(without):
                data, smaller = without, True
            else:
                at += size
        size = size if smaller and size == 1 else size // 2
    return data
