"""The clock of a run: its seconds continue from where an earlier scheduler of the run ended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any


class RunClock:
    """Counts seconds since its creation, by the clock of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._earlier_s = 0.0  # seconds of earlier schedulers

    @property
    def now(self) -> float:
        return self._earlier_s + (self._loop.time() - self._origin)

    def go_on_from(self, now: float) -> None:
        """Continue from `now`, where an earlier scheduler of the run ended."""
        self._origin = self._loop.time()
        self._earlier_s = now  # subtracted from the origin, it could round to an earlier time

    def call_at(self, at: float, call: Callable[..., object], *arguments: Any) -> None:
        """Call `call` when `now` is `at`, or a little later."""
        when = self._origin + (at - self._earlier_s)
        while self._earlier_s + (when - self._origin) < at:  # the sums are rounded
            when = math.nextafter(when, math.inf)
        self._loop.call_at(when, call, *arguments)
