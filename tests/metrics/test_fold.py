"""Folds look at what a journal holds, and at nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import pytest

from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Action, Wake
from rollout_sched.core.model.events import Event
from rollout_sched.metrics.attempts import AttemptIndex
from rollout_sched.metrics.bubbles import Bubbles, FleetShares
from rollout_sched.metrics.fold import (
    SECONDS,
    TOKENS,
    Folded,
    Handler,
    Histogram,
    mean,
    quantile,
    share,
)
from rollout_sched.metrics.length_bias import LengthFold
from rollout_sched.metrics.steps import Steps
from rollout_sched.metrics.waste import Waste


def test_every_fold_names_kinds_of_events_and_actions() -> None:
    attempts = AttemptIndex()
    fleet = FleetShares(attempts, 4)
    bubbles = Bubbles(attempts, fleet, False)
    lengths = LengthFold(lambda group: [1])
    folds = (attempts, fleet, bubbles, Steps(attempts, bubbles, 0.0), Waste(), lengths)
    known = {*get_args(Event), *get_args(Action)}
    for fold in folds:
        assert fold.handlers()
        assert set(fold.handlers()) <= known


class Heard:
    def __init__(self, *kinds: type[Any]) -> None:
        self.kinds = kinds
        self.heard: list[tuple[float, Any]] = []

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {kind: lambda now, said: self.heard.append((now, said)) for kind in self.kinds}


def test_folds_hear_what_they_asked_for() -> None:
    one, two = Heard(ev.Woke), Heard(ev.Woke, Wake)
    folded = Folded(one, two)
    folded.observe(1.0, ev.Woke(), [Wake(2.0)])
    folded.observe(2.0, ev.BatchRequested(), [Wake(3.0)])
    assert one.heard == [(1.0, ev.Woke())]
    assert two.heard == [(1.0, ev.Woke()), (1.0, Wake(2.0)), (2.0, Wake(3.0))]


def test_bounds_are_inclusive_and_counts_cumulative() -> None:
    histogram = Histogram((1, 2.5, 4))
    for value in (0, 1, 1.5, 2.5, 4.1):
        histogram.add(value)
    assert histogram.counts == [2, 2, 0, 1]
    assert histogram.cumulative() == [(1, 2), (2.5, 4), (4, 4), (math.inf, 5)]
    assert histogram.sum == 9.1


def test_the_bounds_of_the_field() -> None:
    assert (SECONDS[0], SECONDS[-1], len(SECONDS)) == (0.005, 3600.0, 35)
    assert (TOKENS[:3], TOKENS[-1]) == ((1, 8, 16), 2**20)
    for bounds in (SECONDS, TOKENS):
        assert list(bounds) == sorted(set(bounds))


def test_of_nothing_they_are_zero() -> None:
    assert share(1.0, 0.0) == mean([]) == quantile([], 0.5) == 0.0


@pytest.mark.parametrize(("q", "value"), [(0.5, 2.0), (0.9, 4.0), (0.99, 4.0), (0.25, 1.0)])
def test_a_quantile_is_the_smallest_value_that_enough_do_not_exceed(q: float, value: float) -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], q) == value
