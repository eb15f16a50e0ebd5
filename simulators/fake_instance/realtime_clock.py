"""Simulated time on the clock of an event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class RealtimeClock:
    """Simulated seconds on the running event loop, `speed` of them in one of its seconds."""

    def __init__(self, speed: float) -> None:
        self.now = 0.0
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self._speed = speed

    def tick(self) -> float:
        """Simulated seconds since the start. A timer may come a little early; time never goes
        back."""
        self.now = max(self.now, (self._loop.time() - self._start) * self._speed)
        return self.now

    def set_speed(self, speed: float) -> None:
        """From now on. What was planned with `call_at` is to be planned anew."""
        self._start = self._loop.time() - self.tick() / speed
        self._speed = speed

    def reach(self, at: float) -> float:
        """Like `tick`, where it is `at` for certain."""
        self.now = max(self.now, at)
        return self.tick()

    def call_at(self, at: float, callback: Callable[[float], None]) -> asyncio.TimerHandle:
        return self._loop.call_at(self._start + at / self._speed, callback, at)


class Alarm:
    """Calls `on_due` with the time when what it watches has something to say.

    `next_at` tells when that is, in simulated seconds; it may be infinite.
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
        """What `next_at` says may have changed. Planning waits for all that is put in at once: what
        two instances say at the same time then comes in the order in which they were first told
        something."""
        if not self._planning:
            self._planning = True
            asyncio.get_running_loop().call_soon(self._plan)

    def close(self) -> None:
        """Never ring again."""
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
