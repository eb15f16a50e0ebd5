"""`make fuzz`: every target for its share of the time, or one input again.

Exits 1 if a law does not hold, after the shortest input found that shows it and the command that
runs it again.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys

from tests.fuzz.engine import Failure, failure, run
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    option = parser.add_argument
    option("--seconds", type=float, default=60.0, help="for all targets; default: %(default)g")
    option("--seed", type=int, help="the same seed makes the same inputs; default: any")
    option("--target", choices=TARGETS, action="append", help="only this one; repeatable")
    option("--input", metavar="HEX", help="only this input; - is the empty one")
    option("--repeat", metavar="FROM:TO", help="what this part of it costs when it is repeated")
    options = parser.parse_args()
    targets = [TARGETS[name] for name in options.target or TARGETS]
    if options.input is not None:
        if len(targets) != 1:
            parser.error("--input needs one --target")
        return _again(targets[0], options.input, options.repeat)
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    return _run(targets, seed, options.seconds / len(targets))


def _run(targets: list[Target], seed: int, seconds: float) -> int:
    print(f"seed {seed}, {seconds:.1f} s for each target", flush=True)
    broken = 0
    for target in targets:
        report = run(target, seed, seconds=seconds)
        speed = report.inputs / report.seconds
        print(f"{target.name:12} {report.inputs:8} inputs {speed:8.0f} a second", flush=True)
        for found in report.failures.values():
            _tell(target, found)
        broken += len(report.failures)
    print(f"{broken} laws broken" if broken else "every law held")
    return 1 if broken else 0


def _again(target: Target, data: str, repeat: str | None) -> int:
    part = None
    if repeat:
        start, _, end = repeat.partition(":")
        part = int(start), int(end)
    logging.disable(logging.CRITICAL)
    found = failure(target, b"" if data == "-" else bytes.fromhex(data), part)
    if found is None:
        print("every law held")
        return 0
    _tell(target, found)
    return 1


def _tell(target: Target, found: Failure) -> None:
    print(f"\n  BROKEN {target.name}: {found.told}")
    print(f"  input  {found.data!r:.1000}")
    print(f"  again  {found.command(target.name)}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
