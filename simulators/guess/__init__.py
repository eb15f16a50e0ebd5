"""A first guess at a scenario, from a GPU and a model."""

from rollout_sched.simulators.guess import command

__all__ = [
    "command",
]
