"""All folds together: they turn a journal into steps and a summary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rollout_sched.core.actions import Action
from rollout_sched.core.events import Event
from rollout_sched.metrics.attempt_index import AttemptIndex
from rollout_sched.metrics.bubbles import Bubbles
from rollout_sched.metrics.fleet_fold import FleetFold
from rollout_sched.metrics.fold import Fold, Handler
from rollout_sched.metrics.length_bias import LengthFold
from rollout_sched.metrics.step import Step
from rollout_sched.metrics.steps import Steps
from rollout_sched.metrics.summary import Summary, summarize
from rollout_sched.metrics.waste import Waste


class Metrics:
    """Folds (now, event, actions), in order, into steps and a summary.

    `reference_batch`: the places of an instance for the occupancy bubble, such as its even share of
    a batch. `offered(group)`: the response lengths the trainer asked for (length bias).
    `colocated`: training takes the instances' GPUs, so the fleet then counts as waiting at the
    barrier. `train_s_per_token`: how long the trainer is busy with a part of a batch; without it,
    the trainer counts as waiting until the last part.
    """

    def __init__(
        self,
        reference_batch: float,
        offered: Callable[[str], Sequence[int]] | None = None,
        *,
        colocated: bool = False,
        train_s_per_token: float = 0.0,
    ) -> None:
        self.attempts = AttemptIndex()
        fleet = FleetFold(self.attempts, reference_batch)
        self._bubbles = Bubbles(self.attempts, fleet.shares, colocated)
        self._steps = Steps(self.attempts, self._bubbles, train_s_per_token)
        self._waste = Waste()
        self._lengths = LengthFold(offered)
        # In this order: the others use the index.
        folds = (self.attempts, fleet, self._bubbles, self._steps, self._waste, self._lengths)
        self._handlers = _merged(folds)

    @property
    def reference_batch(self) -> float:
        return self._bubbles.reference_batch

    @property
    def steps(self) -> list[Step]:
        return self._steps.delivered

    @property
    def curves(self) -> list[list[float]]:
        """For each step: when its samples were finished (see `Steps`)."""
        return self._steps.curves

    def observe(self, now: float, event: Event, actions: Iterable[Action]) -> None:
        """Take the next entry of the journal and the actions of the scheduler."""
        if now > self._bubbles.now:
            self._bubbles.pass_time(now)
        handlers = self._handlers
        for handle in handlers.get(type(event), ()):
            handle(now, event)
        for action in actions:
            for handle in handlers.get(type(action), ()):
                handle(now, action)

    def summary(self, total_s: float) -> Summary:
        """The figures of the run; `total_s` is when its last step was trained, in seconds."""
        bias = self._lengths.bias(self._steps.steady)
        return summarize(self._steps, self._bubbles, self._waste, bias, total_s)


def _merged(folds: Iterable[Fold]) -> dict[type[Any], tuple[Handler, ...]]:
    """The handlers by type, in the order of the folds."""
    merged: dict[type[Any], tuple[Handler, ...]] = {}
    for fold in folds:
        for kind, handler in fold.handlers().items():
            merged[kind] = (*merged.get(kind, ()), handler)
    return merged
