"""The speed of a replay: `python -m benchmarks.replay_speed [--quick]`.

1. The 4,096-request, 25.3 M-token maths trace under one policy on 8 instances, through the real
   core: target under 2 s, of the compiled build 0.2 s. (For the same work on one core of a 2-core
   machine Vidur's loop took 78 s and BLIS 40 s; their hardware models differ, so only wall time can
   be compared.)
2. 1,000,000 requests on 1,024 instances: target under 90 s (compiled 40 s) and 4 GiB, one process.
3. Cost per event by number of instances, at constant work per instance.

Each figure is the median of its repetitions, with the range, in seconds of CPU; on a machine
without other load these are wall seconds. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

import msgspec

from benchmarks.synthetic import synthetic
from rollout_sched.config import load_policy
from rollout_sched.core import scheduler as core
from rollout_sched.simulators.replay import Scenario, load_scenario
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.traces import read
from rollout_sched.simulators.traces.model import Trace

COMPILED = not core.__file__.endswith(".py")
BUILD = "compiled" if COMPILED else "interpreted"
COMPOSITE_TARGET_S = 0.2 if COMPILED else 2.0
MILLION_TARGET_S = 40 if COMPILED else 90
POLICY = "dplb"
GIB = 2**20  # ru_maxrss is in KiB


def composite(repetitions: int) -> bool:
    trace = read("composite_math_512x8")
    seconds = [timed(POLICY, trace, load_scenario("qwen7b-8xh100"))[0] for _ in range(repetitions)]
    median = statistics.median(seconds)
    tokens = sum(sample.response_tokens for sample in trace.samples())
    print(
        f"composite maths, {trace.sample_count} requests, {tokens / 1e6:.1f} M tokens, "
        f"8 instances, "
        f"{POLICY}: {median:.2f} s ({min(seconds):.2f}-{max(seconds):.2f}, {repetitions} runs), "
        f"{trace.sample_count / median:,.0f} requests/s, "
        f"target {COMPOSITE_TARGET_S} s"
    )
    return median < COMPOSITE_TARGET_S


def million(groups: int, instances: int) -> bool:
    """Runs in its own process, so that its peak memory is its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.replay_speed",
        "--large",
        str(groups),
        str(instances),
    ]
    seconds, events, gib = map(float, subprocess.check_output(command, text=True).split())
    print(
        f"{groups * 8:,} requests on {instances:,} instances, {POLICY}: {seconds:.1f} s, "
        f"{events:,.0f} events, {seconds / events * 1e6:.1f} us per event, peak {gib:.2f} GiB, "
        f"target {MILLION_TARGET_S} s and 4 GiB"
    )
    return seconds < MILLION_TARGET_S and gib < 4


def large(groups: int, instances: int) -> None:
    seconds, events = timed(POLICY, synthetic(groups, 8), wide(instances, groups // 16))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIB
    print(seconds, events, peak)


def curve(sizes: list[int]) -> None:
    """The same work per instance on more and more instances: equal cost per event, except log n."""
    print("instances  requests   events  us/event (whole simulation)")
    for instances in sizes:
        groups = instances * 64
        seconds, events = timed(POLICY, synthetic(groups, 8), wide(instances, groups // 2))
        cost = seconds / events * 1e6
        print(f"{instances:9,d} {groups * 8:9,d} {events:8,d}  {cost:.1f}")


def wide(instances: int, prompts_per_step: int) -> Scenario:
    """This many instances, and a trainer that does not slow the run down."""
    base = load_scenario("qwen7b-8xh100-disaggregated")
    change = msgspec.structs.replace
    return change(
        base,
        fleet=change(base.fleet, instances=instances),
        trainer=change(base.trainer, fixed_s=30.0, seconds_per_token=0.0),
        visibility=change(base.visibility, poll_s=60.0),
        job=change(base.job, prompts_per_step=prompts_per_step),
    )


def timed(policy: str, trace: Trace, scenario: Scenario) -> tuple[float, int]:
    """(seconds of CPU, events) of one run."""
    start = time.process_time()
    run = run_policy(load_policy(policy), trace, scenario)
    return time.process_time() - start, run.events


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the large run")
    parser.add_argument("--large", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.large:
        large(*options.large)
        return 0
    print(f"{BUILD} build")
    met = composite(5)
    curve([8, 32, 128] if options.quick else [8, 32, 128, 512])
    met &= million(12_500, 128) if options.quick else million(125_000, 1_024)
    print("every target is met" if met else "A TARGET IS MISSED")
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
