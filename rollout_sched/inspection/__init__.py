"""Reads the journal of a live or replayed run: figures, a trace, a timeline."""

from rollout_sched.inspection import command
from rollout_sched.inspection.recording import TraceFold

__all__ = [
    "TraceFold",
    "command",
]
