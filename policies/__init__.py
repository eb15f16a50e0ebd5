"""The classes that answer the roles of `core.roles`, one module for each role."""

from rollout_sched.policies import (
    admission,
    affinity,
    batching,
    freshness,
    interruption,
    lending,
    migration,
    ordering,
    prediction,
    routing,
    selection,
    weights,
)

__all__ = [
    "admission",
    "affinity",
    "batching",
    "freshness",
    "interruption",
    "lending",
    "migration",
    "ordering",
    "prediction",
    "routing",
    "selection",
    "weights",
]
