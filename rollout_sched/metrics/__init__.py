"""Metrics: folds over the journal, and over nothing else, live and simulated alike."""

from rollout_sched.metrics.attempt_index import AttemptIndex
from rollout_sched.metrics.bubbles import CAUSES
from rollout_sched.metrics.length_bias import LengthBias
from rollout_sched.metrics.metrics import Metrics
from rollout_sched.metrics.step import Step
from rollout_sched.metrics.summary import Summary

__all__ = [
    "CAUSES",
    "AttemptIndex",
    "LengthBias",
    "Metrics",
    "Step",
    "Summary",
]
