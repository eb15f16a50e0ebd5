"""`make fuzz`: runs every target for its share of the time, or one input again.

If a law does not hold, it prints the shortest input found and the command that runs it again, and
exits with 1.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
from collections.abc import Iterable

from tests.fuzz.corpus import keep
from tests.fuzz.engine import Failure, Report, failure, run
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

#: Bytes by which a process may grow in the second half of a target's inputs.
MAX_GROWN = 64 * 2**20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    option = parser.add_argument
    option("--seconds", type=float, default=60.0, help="total seconds; default: %(default)g")
    option("--inputs", type=int, help="instead of --seconds: total inputs of all targets")
    option("--keep", action="store_true", help="save failing inputs in the corpus, as files")
    option("--seed", type=int, help="the same seed makes the same inputs; default: any")
    option("--target", choices=TARGETS, action="append", help="only this one; repeatable")
    option("--input", metavar="HEX", help="only this input; - is the empty input")
    option("--repeat", metavar="FROM:TO", help="measure the cost of repeating this part")
    options = parser.parse_args()
    targets = [TARGETS[name] for name in options.target or TARGETS]
    if options.input is not None:
        if len(targets) != 1:
            parser.error("--input needs one --target")
        return _again(targets[0], options.input, options.repeat)
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    if options.inputs is None:
        seconds = options.seconds / len(targets)
        print(f"seed {seed}, {seconds:.1f} s for each target", flush=True)
        reports = (run(target, seed, seconds=seconds) for target in targets)
    else:
        print(f"seed {seed}, {options.inputs} inputs", flush=True)
        reports = (
            run(target, seed, inputs=share)
            for target, share in zip(targets, _shares(targets, options.inputs), strict=True)
        )
    return _told(zip(targets, reports, strict=True), keeping=options.keep)


def _shares(targets: list[Target], inputs: int) -> list[int]:
    """The inputs for each target, so that all take about the same time: targets that need files or
    a whole gateway get fewer."""
    speeds = [run(target, 0, seconds=0.5) for target in targets]
    per_s = [report.inputs / report.seconds for report in speeds]
    return [round(inputs * each / sum(per_s)) for each in per_s]


def _told(reports: Iterable[tuple[Target, Report]], *, keeping: bool) -> int:
    broken, inputs, seconds = 0, 0, 0.0
    for target, report in reports:
        speed = report.inputs / report.seconds
        told = f"{target.name:14} {report.inputs:8} inputs {speed:8.0f} a second"
        print(f"{told}, grown by {report.grown / 2**20:4.0f} MiB", flush=True)
        for found in report.failures.values():
            _tell(target, found)
            if keeping and found.part is None:
                print(f"  kept   {keep(target.name, found.data)}\n", flush=True)
        broken += len(report.failures) + (report.grown > MAX_GROWN)
        inputs, seconds = inputs + report.inputs, seconds + report.seconds
    print(f"{inputs} inputs in {seconds:.0f} s")
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
