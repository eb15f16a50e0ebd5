"""Recorded workloads: their model, the native format, foreign ones, statistics, synthetic ones."""

from rollout_sched.simulators.traces.counting import Counting, with_tokenizer
from rollout_sched.simulators.traces.model import (
    Finish,
    SampleRecord,
    Trace,
    TraceError,
    Turn,
    gather,
)
from rollout_sched.simulators.traces.store import read, shipped, write

__all__ = [
    "Counting",
    "Finish",
    "SampleRecord",
    "Trace",
    "TraceError",
    "Turn",
    "gather",
    "read",
    "shipped",
    "with_tokenizer",
    "write",
]
