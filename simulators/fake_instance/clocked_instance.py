"""A simulated instance on the clock of an event loop: inputs count now, outputs come when due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollout_sched.simulators.fake_instance.realtime_clock import Alarm, RealtimeClock
from rollout_sched.simulators.fake_instance.token_streams import OnProgress, TokenStreams
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.instance.sim_request import Ended, Outcome, PauseMode, SimRequest


class ClockedInstance:
    """Calls `on_outcome` with each outcome of a `SimInstance` (see its docstrings) when it happens.

    `speed` simulated seconds pass per second of the running loop.
    """

    def __init__(
        self, instance: SimInstance, speed: float, on_outcome: Callable[[Outcome], None]
    ) -> None:
        self._instance = instance
        self._on_outcome = on_outcome
        self._streams = TokenStreams(instance)
        self._clock = RealtimeClock(speed)
        self._alarm = Alarm(self._clock, self._next_at, self._listen)

    def submit(
        self, request: SimRequest, every: int = 0, on_progress: OnProgress | None = None
    ) -> None:
        """`on_progress` is called for every `every` more tokens. Raises ValueError."""
        self._instance.submit(request, self._clock.tick())
        if every and on_progress is not None:
            self._streams.add(request.attempt, every, on_progress)
        self._alarm.change()

    def abort(self, attempt: int) -> None:
        self._instance.abort(attempt, self._clock.tick())
        self._alarm.change()

    def stop_telling(self, attempt: int) -> None:
        """Report no more progress of this attempt."""
        self._streams.remove(attempt)

    def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        self._instance.pause(self._clock.tick(), mode, clear_cache)
        self._alarm.change()

    def resume(self) -> None:
        self._instance.resume(self._clock.tick())
        self._alarm.change()

    def set_version(self, version: int) -> None:
        self._instance.set_version(version, self._clock.tick())
        self._alarm.change()

    def clear_cache(self, *, preempt: bool) -> bool:
        """vLLM's reset_prefix_cache; False if it fails because blocks are in use."""
        self._listen(self._clock.tick())
        in_use = self._instance.gauges().running > 0
        self._instance.clear_cache(self._clock.now, preempt)
        self._alarm.change()
        return preempt or not in_use

    def set_speed(self, speed: float) -> None:
        """From now on, `speed` simulated seconds pass per second."""
        self._clock.set_speed(speed)
        self._alarm.change()

    async def catch_up(self) -> None:
        """Returns when everything that is due by now has been reported."""
        while self._instance.next_at() <= self._clock.tick():
            self._listen(self._clock.now)
            await asyncio.sleep(0)  # whoever got an answer runs first
        self._instance.advance(self._clock.now)  # no new look at the clock: nothing more is due

    def close(self) -> None:
        """Report nothing more."""
        self._alarm.close()

    def _next_at(self) -> float:
        return min(self._instance.next_at(), self._streams.next_at())

    def _listen(self, at: float) -> None:
        """Report what has happened by now."""
        clock = self._clock
        for outcome in self._instance.advance(clock.reach(at)):
            if isinstance(outcome, Ended):
                self._streams.remove(outcome.attempt)
            self._on_outcome(outcome)
        self._streams.advance(clock.now)
        self._alarm.change()
