"""The cost of a link's delay: `python benchmarks/link_delay.py [--quick] [--seeds N]`.

A fleet of 1,024 instances behind 16 fronts, in virtual time and with the real core: the same
training with links of no delay, and of 1, 10 and 100 ms one way. A free slot waits for the answer's
way to the scheduler and for the next order's way back. That is the whole cost, because the instance
continues its other work. Target: at 10 ms the rollout takes less than 1 % longer.

Another delay gives another order of events, and that alone moves the end of a rollout by about one
percent in either direction. So each figure is the mean over seeds, with the standard error of
paired differences.

Exit code 1 if the target is missed by more than two of these.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys

import msgspec

from rollout_sched.config import load_policy
from rollout_sched.simulators.replay import Scenario, load_scenario
from rollout_sched.simulators.replay.links import Links
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.traces.model import Trace
from rollout_sched.simulators.traces.synthetic import synthetic

FRONTS = 16
DELAYS_S = (0.0, 0.001, 0.01, 0.1)
POLICY = "dplb"
TARGET = 0.01
#: Requests per slot of the fleet: most of them wait at first, so each answer brings an order.
PER_SLOT = 3
SAMPLES = 8
#: Median and cap of the answers, in tokens.
SHAPES = ((256, 2_048), (4055, 32_768))


def scenario(instances: int, slots: int, delay_s: float) -> Scenario:
    base = load_scenario("qwen7b-8xh100-disaggregated")
    change = msgspec.structs.replace
    return change(
        base,
        fleet=change(base.fleet, instances=instances, max_num_seqs=slots),
        visibility=change(base.visibility, poll_s=60.0),
        job=change(base.job, prompts_per_step=instances * slots * PER_SLOT // SAMPLES),
        links=Links(FRONTS, delay_s),
    )


def times(trace: Trace, world: Scenario) -> tuple[float, float]:
    """Seconds of one step with all prompts, from the first dispatch to 90 % of the answers, and to
    the last one."""
    run = run_policy(load_policy(POLICY), trace, world)
    assert not run.samples_lost
    assert not run.anomalies, run.anomalies
    (step,) = run.steps
    return step.t90_s, step.rollout_s


def measure(shape: tuple[int, int], instances: int, slots: int, seeds: int) -> bool:
    """Whether answers of this shape meet the target."""
    groups = instances * slots * PER_SLOT // SAMPLES
    median, cap = shape
    traces = [synthetic(groups, SAMPLES, median=median, cap=cap, seed=n) for n in range(seeds)]
    plain: list[tuple[float, float]] = []
    met = True
    for delay_s in DELAYS_S:
        world = scenario(instances, slots, delay_s)
        took = [times(trace, world) for trace in traces]
        plain = plain or took
        shown = f"{median:6,d} tokens {delay_s * 1e3:5.0f} ms"
        for seconds, without in zip(zip(*took, strict=True), zip(*plain, strict=True), strict=True):
            costs = [a / b - 1 for a, b in zip(seconds, without, strict=True)]
            cost, error = statistics.mean(costs), statistics.stdev(costs) / math.sqrt(seeds)
            met &= delay_s > 0.01 or cost - 2 * error < TARGET
            shown += f" {statistics.mean(seconds):9.2f} s {cost:+7.2%} +-{error:.2%}"
        print(shown, flush=True)
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the fleet")
    parser.add_argument("--seeds", type=int, help="how many, at least 2 (12, or 3 if quick)")
    given = parser.parse_args()
    instances, slots, seeds = (64, 8, 3) if given.quick else (1024, 4, 12)
    seeds = max(2, given.seeds or seeds)
    requests = instances * slots * PER_SLOT
    print(
        f"{requests:,} requests on {instances:,} instances of {slots} slots, {FRONTS} fronts, "
        f"{POLICY}, {seeds} seeds"
    )
    print("median answer    delay    nine tenths  beyond no delay    rollout  beyond no delay")
    met = [measure(shape, instances, slots, seeds) for shape in SHAPES]
    print("the target is met" if all(met) else "THE TARGET IS MISSED")
    return int(not all(met))


if __name__ == "__main__":
    sys.exit(main())
