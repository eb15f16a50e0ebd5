"""Tuning: find the policy and parameters that suit a trace, a fleet and the user's limits."""

from rollout_sched.simulators.tune import command

__all__ = ["command"]
