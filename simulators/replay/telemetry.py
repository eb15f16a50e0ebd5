"""What the scheduler sees of running requests: polls and streams at their intervals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_sched.core.events import Event, TokensArrived
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.scenario import Visibility
from rollout_sched.simulators.replay.sim_attempts import SimAttempts
from rollout_sched.simulators.replay.sim_fleet import SimFleet


class Telemetry:
    """Polls every instance and reads every stream at fixed intervals.

    ticks  how many of its own callbacks are in the queue; they do not count as progress of a run
    """

    def __init__(
        self,
        visibility: Visibility,
        fleet: SimFleet,
        attempts: SimAttempts,
        queue: EventQueue,
        tell: Callable[[Event], None],
    ) -> None:
        self.ticks = 0
        self._visibility = visibility
        self._fleet = fleet
        self._attempts = attempts
        self._queue = queue
        self._tell = tell

    def start(self) -> None:
        if self._visibility.poll_s:
            self._tick(self._visibility.poll_s, self.report)
        if self._visibility.stream_s:
            self._tick(self._visibility.stream_s, self._stream)

    def report(self) -> None:
        for node in list(self._fleet.nodes.values()):
            self._fleet.catch_up(node)
            if not node.paused_by:  # a paused vLLM's gauges freeze
                self._tell(node.report())

    def _stream(self) -> None:
        for node in list(self._fleet.nodes.values()):
            self._fleet.catch_up(node)
            for attempt, tokens in node.instance.progress(self._queue.now).items():
                if attempt in self._attempts:  # else it has failed and is being removed
                    self._tell(TokensArrived(self._attempts.request_of(attempt), attempt, tokens))

    def _tick(self, seconds: float, callback: Callable[[], None]) -> None:
        def again(_: Any) -> None:
            self.ticks -= 1
            callback()
            self._tick(seconds, callback)

        self.ticks += 1
        self._queue.after(seconds, again)
