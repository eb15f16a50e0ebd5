"""How often the intervals of `tune` contain what a run on fresh prompts gives.

Each case of `benchmarks.lab` is drawn with twice as many prompts. Of one half, as `tune` does with
a user's recording, a third is held out, and the speed-up of a policy over `round_robin_sync` is
measured on draws of it; then both policies train the other half. Claimed: 95 %.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import msgspec

from benchmarks import lab
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.traces.model import Trace
from rollout_sched.simulators.tune.candidates import REFERENCE, Candidate, presets
from rollout_sched.simulators.tune.evaluation import (
    Case,
    CaseFigures,
    SpeedUp,
    Task,
    bench_of,
    figures,
    speed_up,
)

POLICIES = ("best_async", "tail_batching", "areal", "streamed_sync")
SEEDS = range(1001, 1006)


class Checked(NamedTuple):
    """The interval from one half, and the ratio on the other."""

    case: str
    policy: str
    claimed: SpeedUp
    fresh: float

    @property
    def inside(self) -> bool:
        return self.claimed.low <= self.fresh <= self.claimed.high


def half(trace: Trace, parity: int) -> Trace:
    """Every second prompt."""
    names = list(trace.groups)[parity::2]
    return msgspec.structs.replace(trace, groups={name: trace.groups[name] for name in names})


def checked(seed: int, steps: int) -> Checked:
    drawn = lab.case(seed, 2 * steps)
    bench = bench_of(half(drawn.trace, 0), drawn.scenario, seed=seed)
    by_name = {one.preset: one for one in presets(bench.setting(max_staleness=1))}
    policy = by_name[POLICIES[seed // len(lab.SHAPES) % len(POLICIES)]]
    pair = (policy, by_name[REFERENCE])

    def measured(one: Candidate) -> list[CaseFigures]:
        cases = [Case(steps, number, held_out=True) for number in SEEDS]
        return [bench(Task(one.table, case)) for case in cases]

    def fresh(one: Candidate) -> CaseFigures:
        run = run_policy(one.policy(), half(drawn.trace, 1), drawn.scenario, steps=steps)
        return figures(run)

    claimed = speed_up(*[measured(one) for one in pair])
    true = speed_up(*[[fresh(one)] for one in pair])
    return Checked(drawn.name, policy.name, claimed, true.mean)


def shown(found: Sequence[Checked]) -> str:
    inside = sum(one.inside for one in found)
    return f"{inside} of {len(found)} intervals contain the fresh run ({inside / len(found):.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first case")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.cases)
    with ProcessPoolExecutor(options.jobs) as pool:
        asked = [pool.submit(checked, seed, options.steps) for seed in seeds]
        found = []
        for each in asked:
            one = each.result()
            found.append(one)
            mark = "inside " if one.inside else "OUTSIDE"
            print(
                f"{mark} {one.fresh:.2f}, claimed {one.claimed} {one.policy}, {one.case}",
                flush=True,
            )
    print(shown(found))


if __name__ == "__main__":
    main()
