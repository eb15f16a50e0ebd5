"""The clock of a run: seconds that go on where an earlier scheduler of the run has ended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any


class RunClock:
    """Counts from its making, by the clock of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._earlier_s = 0.0  # that earlier schedulers have taken

    @property
    def now(self) -> float:
        return self._earlier_s + (self._loop.time() - self._origin)

    def go_on_from(self, now: float) -> None:
        """An earlier scheduler of the same run had come to this time."""
        self._origin = self._loop.time()
        self._earlier_s = now  # put into the origin, it could be rounded to an earlier time

    def call_at(self, at: float, call: Callable[..., object], *arguments: Any) -> None:
        """Call this when `now` is `at`, or a little later."""
        when = self._origin + (at - self._earlier_s)
        while self._earlier_s + (when - self._origin) < at:  # the sums are rounded
            when = math.nextafter(when, math.inf)
        self._loop.call_at(when, call, *arguments)
