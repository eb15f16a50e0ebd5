"""The cost of one decision of the core: `python benchmarks/decision_cost.py`.

1,024 instances hold 100,000 requests in flight, and more wait in a queue. Events come one at a
time: for each answer the core counts the tokens, sometimes completes a group, predicts the siblings
again, and dispatches from the queue to the least loaded instance. Target: a median under 20 us, 10
us for the compiled build. The curves vary one size at a time; growth beyond log n would be visible
there.

Exit code 1 if the target is missed.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time

from rollout_sched.config import load_policy
from rollout_sched.core import FactRecorder
from rollout_sched.core import scheduler as core
from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import (
    BatchRequested,
    GroupSubmitted,
    InstanceJoined,
    RequestFinished,
)

COMPILED = not core.__file__.endswith(".py")
BUILD = "compiled" if COMPILED else "interpreted"
TARGET_US = 10 if COMPILED else 20
POLICY = "dplb"
GROUP = 8

#: Events between two writes of changes to a store.
LOOK = 1000


def measure(
    instances: int, in_flight: int, waiting: int, events: int = 20_000, *, recorded: bool = False
) -> list[float]:
    """Microseconds for each of the answers; `recorded`: changes for a store are recorded too, and
    collected after every `LOOK` answers."""
    rng = random.Random(0)
    groups = (in_flight + waiting) // GROUP
    scheduler = load_policy(POLICY).scheduler(prompts_per_step=groups)
    slots = -(-in_flight // instances)
    running: list[Dispatch] = []
    for number in range(instances):
        scheduler.handle(InstanceJoined(f"instance-{number}", slots, 10**9), 0.0)
    for number in range(groups):
        scheduler.handle(GroupSubmitted(f"group-{number}", GROUP, 200, 32_768), 0.0)
    running += scheduler.handle(BatchRequested(), 0.0)
    recorder = FactRecorder(scheduler) if recorded else None
    costs: list[float] = []
    gc.collect()
    gc.disable()
    for _ in range(min(events, in_flight + waiting - GROUP)):
        place = rng.randrange(len(running))
        running[place], running[-1] = running[-1], running[place]
        dispatch = running.pop()
        event = RequestFinished(dispatch.request, dispatch.attempt, rng.randrange(1, 32_768))
        start = time.perf_counter_ns()
        actions = scheduler.handle(event, 1.0)
        if recorder is not None:
            recorder.observe(1.0, event, actions)
            if not len(costs) % LOOK:
                recorder.changes()
        costs.append((time.perf_counter_ns() - start) / 1e3)
        running += [action for action in actions if isinstance(action, Dispatch)]
    gc.enable()
    return costs


def show(instances: int, in_flight: int, waiting: int, *, recorded: bool = False) -> float:
    costs = sorted(measure(instances, in_flight, waiting, recorded=recorded))
    median = statistics.median(costs)
    p99 = costs[int(0.99 * len(costs))]
    store = f"   for a store, mean {statistics.mean(costs):.1f}" if recorded else ""
    print(f"{instances:9,d} {in_flight:9,d} {waiting:9,d}   {median:6.1f} {p99:6.1f}{store}")
    return median


def main() -> int:
    print(f"{BUILD} build, policy {POLICY}, microseconds per event")
    print("instances in flight   waiting   median    p99")
    median = show(1_024, 100_000, 20_000)
    show(1_024, 100_000, 20_000, recorded=True)
    for instances in (16, 64, 256, 1_024, 4_096):
        show(instances, 32_768, 8_192)
    for waiting in (8, 1_000, 10_000, 100_000):
        show(256, 32_768, waiting)
    met = median < TARGET_US
    print(
        f"median at 1,024 instances and 100,000 in flight: {median:.1f} us, target {TARGET_US} us, "
        f"{'met' if met else 'MISSED'}"
    )
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
