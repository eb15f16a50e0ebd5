"""Metrics: folds over the journal, and over nothing else, live and simulated alike."""

from rollout_sched.metrics import attempts, fold, live, outages, waits
from rollout_sched.metrics.bubbles import CAUSES, FleetTimes
from rollout_sched.metrics.length_bias import order_excess
from rollout_sched.metrics.metrics import Metrics
from rollout_sched.metrics.results import Step, Summary
from rollout_sched.metrics.steps import Trained

__all__ = [
    "CAUSES",
    "FleetTimes",
    "Metrics",
    "Step",
    "Summary",
    "Trained",
    "attempts",
    "fold",
    "live",
    "order_excess",
    "outages",
    "waits",
]
