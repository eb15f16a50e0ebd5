"""Tuning: find the policy and parameters that suit a trace, a fleet and the user's limits."""

from rollout_sched.simulators.tune import command
from rollout_sched.simulators.tune.evaluation import HardLimits, WorkerPool
from rollout_sched.simulators.tune.retuning import Better, Question, better

__all__ = [
    "Better",
    "HardLimits",
    "Question",
    "WorkerPool",
    "better",
    "command",
]
