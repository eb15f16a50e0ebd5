"""`rollout-sched top`: the live state of a gateway in a terminal."""

from rollout_sched.top import command

__all__ = [
    "command",
]
