"""Measures how late the event loop runs callbacks that are due; every call waits at least this."""

from __future__ import annotations

import asyncio

from rollout_sched.metrics.histogram import Histogram

#: Seconds between two measurements; each costs a timer.
EVERY_S = 0.25

#: Upper bounds in seconds: from negligible to long enough for health checks to time out.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LoopLag:
    """`seconds`: histogram of how late a timer fired."""

    def __init__(self) -> None:
        self.seconds = Histogram(BOUNDS)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Measure until `stop`."""
        loop = asyncio.get_running_loop()
        self._wait(loop, loop.time() + EVERY_S)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._timer = loop.call_at(due, self._look, loop, due)

    def _look(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        self.seconds.add(max(0.0, now - due))
        self._wait(loop, now + EVERY_S)
