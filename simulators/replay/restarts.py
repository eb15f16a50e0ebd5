"""Restarts of the scheduler in a replay: one dies, and another continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rollout_sched.core.actions import Action
from rollout_sched.core.events import Event, Restored
from rollout_sched.core.facts import FactRecorder, FoldedFacts
from rollout_sched.core.scheduler import Scheduler


class Restarts:
    """Records what a scheduler must remember, and makes the next one from that alone.

    `make`: makes a fresh scheduler of the same policy. `anomalies` are those of the schedulers that
    have died.
    """

    def __init__(self, scheduler: Scheduler, make: Callable[[], Scheduler]) -> None:
        self.anomalies: Counter[str] = Counter()
        self._scheduler = scheduler
        self._make = make
        self._recorder = FactRecorder(scheduler)
        self._folded = FoldedFacts()

    def observe(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        self._recorder.observe(now, event, actions)

    def restart(self) -> tuple[Scheduler, Restored]:
        """The scheduler that continues, and the first event it must get."""
        changes = self._recorder.changes()
        if changes is not None:
            self._folded.add(changes)
        self.anomalies.update(self._scheduler.view.anomalies)
        event = Restored(self._folded.state)
        self._scheduler = scheduler = self._make()
        self._recorder, self._folded = FactRecorder(scheduler), FoldedFacts()
        return scheduler, event
