"""policies"""

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
