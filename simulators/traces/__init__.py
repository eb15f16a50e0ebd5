"""Recorded workloads: their model, the native format, foreign ones, statistics."""

from rollout_sched.simulators.traces import command, lengths, model
from rollout_sched.simulators.traces.model import (
    Counting,
    Finish,
    SampleRecord,
    Trace,
    TraceError,
    Turn,
    gather,
    with_tokenizer,
)
from rollout_sched.simulators.traces.store import read, shipped, write

__all__ = [
    "Counting",
    "Finish",
    "SampleRecord",
    "Trace",
    "TraceError",
    "Turn",
    "command",
    "gather",
    "lengths",
    "model",
    "read",
    "shipped",
    "with_tokenizer",
    "write",
]
