"""Collect what a replay reports in addition to its metrics."""

from __future__ import annotations

from collections.abc import Callable

from rollout_sched.core.actions import Action, Deliver, Lend
from rollout_sched.core.errors import PolicyError
from rollout_sched.core.events import Event
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import SampleRecord

#: Called at each delivery with the number of groups delivered.
Progress = Callable[[int], None]


class RunNotes:
    """An observer of one run.

    delivered  the samples of each batch, as recorded
    in_parts   training overlaps with the generation of its own batch
    events     the number of events
    """

    def __init__(
        self, policy: str, workload: Workload, progress: Progress | None, give_up_s: float
    ) -> None:
        self.delivered: list[list[SampleRecord]] = []
        self.in_parts = False
        self.events = 0
        self._policy = policy
        self._workload = workload
        self._progress = progress
        self._give_up_s = give_up_s

    def observe(self, now: float, event: Event, actions: list[Action]) -> None:
        """Raises PolicyError if the run lasts longer than `give_up_s`."""
        self.events += 1
        if now > self._give_up_s:
            raise PolicyError(f"{self._policy}: run not finished after {self._give_up_s:.0f} s")
        for action in actions:
            if type(action) is Lend:
                self.in_parts = True
            elif type(action) is Deliver:
                self._deliver(action)

    def _deliver(self, action: Deliver) -> None:
        self.in_parts |= not action.last
        if action.part == 0:
            self.delivered.append([])
        self.delivered[-1] += [self._workload.sample(s.group, s.index) for s in action.samples]
        if self._progress is not None:
            self._progress(len({sample.group for sample in action.samples}))
