"""Reads the journal of a live or replayed run: figures, a trace, a scenario, a timeline."""

from rollout_sched.inspection import command, replays
from rollout_sched.inspection.trace_fold import recorded_trace

__all__ = [
    "command",
    "recorded_trace",
    "replays",
]
