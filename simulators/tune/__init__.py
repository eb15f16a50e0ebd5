"""Tuning: find the policy and parameters that suit a trace, a fleet and the user's limits.

bench = bench_of(trace, scenario, seed=0)
limits, plan = HardLimits(max_staleness=1), Plan(steps=24, evaluations=100)
with WorkerPool(bench, jobs=4) as workers:
    result = tune(bench, limits, plan, workers)
print(policy_file(result, bench))
"""

from rollout_sched.simulators.tune import command
from rollout_sched.simulators.tune.command import policy_file, report
from rollout_sched.simulators.tune.evaluation import HardLimits, bench_of
from rollout_sched.simulators.tune.search import Plan, TuningResult, tune
from rollout_sched.workers import WorkerPool

__all__ = [
    "HardLimits",
    "Plan",
    "TuningResult",
    "WorkerPool",
    "bench_of",
    "command",
    "policy_file",
    "report",
    "tune",
]
