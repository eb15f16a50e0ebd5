"""Simulated time on the clock of an event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class RealtimeClock:
    """Simulated seconds on the running event loop, `speed` per second of the loop."""

    def __init__(self, speed: float) -> None:
        self.now = 0.0
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self._speed = speed

    def tick(self) -> float:
        """Simulated seconds since the start. A timer may fire slightly early, but time never goes
        back."""
        self.now = max(self.now, (self._loop.time() - self._start) * self._speed)
        return self.now

    def set_speed(self, speed: float) -> None:
        """Applies from now on. Timers set with `call_at` must be set again."""
        self._start = self._loop.time() - self.tick() / speed
        self._speed = speed

    def reach(self, at: float) -> float:
        """Like `tick`, but at least `at`."""
        self.now = max(self.now, at)
        return self.tick()

    def call_at(self, at: float, callback: Callable[[float], None]) -> asyncio.TimerHandle:
        return self._loop.call_at(self._start + at / self._speed, callback, at)


class Alarm:
    """Calls `on_due` with the time when an output of the watched objects is due.

    `next_at` returns the time of the next output, in simulated seconds; it may be infinite.
    """

    def __init__(
        self,
        clock: RealtimeClock,
        next_at: Callable[[], float],
        on_due: Callable[[float], None],
    ) -> None:
        self._clock = clock
        self._next_at = next_at
        self._on_due = on_due
        self._timer: asyncio.TimerHandle | None = None
        self._planning = False
        self._closed = False

    def change(self) -> None:
        """The result of `next_at` may have changed. The timer is set after all inputs of the same
        moment, so that simultaneous outputs of two instances come in the order of their first
        inputs."""
        if not self._planning:
            self._planning = True
            asyncio.get_running_loop().call_soon(self._plan)

    def close(self) -> None:
        """Never call again."""
        self._closed = True
        self._cancel()

    def _plan(self) -> None:
        self._planning = False
        self._cancel()
        if not self._closed:
            at = self._next_at()
            if at < math.inf:
                self._timer = self._clock.call_at(at, self._on_due)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
