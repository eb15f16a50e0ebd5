"""The steps of a live run, as the replay's report counts them, from the first group on."""

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

#: Before there is a trainer.
_LOOKED_AT = frozenset((InstanceJoined, InstanceLost, GroupSubmitted, BatchRequested))


class LiveSteps:
    """An observer of a driver. Where there is no trainer it costs a look at each event's type.

    duration        seconds from one delivery to the next
    idle_s          instance-seconds that steps lost with nothing in flight, by cause
    capacity_s      instance-seconds of the steps
    trainer_wait_s  seconds that the trainer waited for them
    last            the last step that has ended

    A step that has ended is kept: about a kilobyte.
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
        """All that have ended."""
        return () if self._metrics is None else self._metrics.steps

    def begin(self, now: float) -> None:
        """Count from now on: there is a trainer already."""
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
        """The occupancy bubble, for which `Metrics` wants a batch, is not shown."""
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
