"""Measures what the engine steps of a running vLLM cost and writes a scenario from it."""

from rollout_sched.calibration import command

__all__ = [
    "command",
]
