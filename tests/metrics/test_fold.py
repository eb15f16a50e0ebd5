"""Folds look at what a journal holds, and at nothing else."""

from __future__ import annotations

from typing import get_args

from rollout_sched.core.model.actions import Action
from rollout_sched.core.model.events import Event
from rollout_sched.metrics.attempts import AttemptIndex
from rollout_sched.metrics.bubbles import Bubbles, FleetFold
from rollout_sched.metrics.length_bias import LengthFold
from rollout_sched.metrics.steps import Steps
from rollout_sched.metrics.waste import Waste


def test_every_fold_names_kinds_of_events_and_actions() -> None:
    attempts = AttemptIndex()
    fleet = FleetFold(attempts, 4)
    bubbles = Bubbles(attempts, fleet.shares, False)
    lengths = LengthFold(lambda group: [1])
    folds = (attempts, fleet, bubbles, Steps(attempts, bubbles, 0.0), Waste(), lengths)
    known = {*get_args(Event), *get_args(Action)}
    for fold in folds:
        assert fold.handlers()
        assert set(fold.handlers()) <= known
