"""Metrics: folds over the journal, and over nothing else, live and simulated alike."""

from rollout_sched.metrics.attempts import AttemptIndex
from rollout_sched.metrics.bubbles import CAUSES
from rollout_sched.metrics.length_bias import LengthBias
from rollout_sched.metrics.steps import Step
from rollout_sched.metrics.summary import Metrics, Summary

__all__ = [
    "CAUSES",
    "AttemptIndex",
    "LengthBias",
    "Metrics",
    "Step",
    "Summary",
]
