"""The steps of a live run, counted from the first group on as in the replay's report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rollout_sched.core.actions import Action
from rollout_sched.core.events import (
    BatchRequested,
    Event,
    GroupSubmitted,
    InstanceJoined,
    InstanceLost,
)
from rollout_sched.metrics.histogram import SECONDS, Histogram
from rollout_sched.metrics.metrics import Metrics
from rollout_sched.metrics.step import Step

#: Events that are used before there is a trainer.
_LOOKED_AT = frozenset((InstanceJoined, InstanceLost, GroupSubmitted, BatchRequested))


class LiveSteps:
    """An observer of a driver. Without a trainer it costs only a look at each event's type.

    duration        seconds from one delivery to the next
    idle_s          instance-seconds of the steps with nothing in flight, by cause
    capacity_s      instance-seconds of the steps
    trainer_wait_s  seconds that the trainer waited for the steps
    last            the last finished step

    Each finished step stays in memory: about a kilobyte.
    """

    def __init__(self, on_step: Callable[[int, Step], object] | None = None) -> None:
        self.duration = Histogram(SECONDS)
        self.idle_s: Counter[str] = Counter()
        self.capacity_s = 0.0
        self.trainer_wait_s = 0.0
        self.last: Step | None = None
        self._on_step = on_step
        self._joined: dict[str, InstanceJoined] = {}
        self._metrics: Metrics | None = None
        self._began_s = 0.0
        self._ended = 0

    @property
    def delivered(self) -> Sequence[Step]:
        """All finished steps."""
        return () if self._metrics is None else self._metrics.steps

    def begin(self, now: float) -> None:
        """Count from now on: a trainer is here already."""
        self._metrics = self._begin(now)

    def observe(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        metrics = self._metrics
        if metrics is None:
            if type(event) not in _LOOKED_AT or not self._begins(event):
                return
            metrics = self._metrics = self._begin(now)
        metrics.observe(now, event, actions)
        while self._ended < len(metrics.steps):
            self._step_ended(metrics.steps[self._ended])

    def _begins(self, event: Event) -> bool:
        """Whether a trainer is here."""
        if isinstance(event, InstanceJoined):
            self._joined[event.instance] = event
        elif isinstance(event, InstanceLost):
            self._joined.pop(event.instance, None)
        return isinstance(event, GroupSubmitted | BatchRequested)

    def _begin(self, now: float) -> Metrics:
        """`Metrics` needs a batch for the occupancy bubble, which is not shown."""
        self._began_s = now
        slots = (event.slots for event in self._joined.values())
        metrics = Metrics(max(slots, default=1))
        for event in self._joined.values():
            metrics.observe(now, event, ())
        return metrics

    def _step_ended(self, step: Step) -> None:
        self._ended += 1
        self.last = step
        self.duration.add(step.end_s - max(step.start_s, self._began_s))
        self.idle_s.update(step.idle_s)
        self.capacity_s += step.capacity_s
        self.trainer_wait_s += step.trainer_wait_s
        if self._on_step is not None:
            self._on_step(self._ended, step)
