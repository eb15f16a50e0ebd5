"""Virtual time: a heap of (time, serial, callback), as in SimPy; equal times keep their order."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Callback = Callable[[Any], None]


class EventQueue:
    """The time of a simulation and its pending callbacks. `now`: in seconds, never goes back."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callback, Any]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time: float, callback: Callback, argument: Any = None) -> None:
        """Call `callback(argument)` at `time`, or now if that has passed."""
        self._serial += 1
        now = self.now
        heappush(self._heap, (time if time > now else now, self._serial, callback, argument))

    def after(self, seconds: float, callback: Callback, argument: Any = None) -> None:
        self.at(self.now + seconds, callback, argument)

    def clear(self) -> None:
        """Drop all pending callbacks."""
        self._heap.clear()

    def step(self) -> None:
        """Go to the next callback and call it. Raises IndexError if there is none."""
        self.now, _, callback, argument = heappop(self._heap)
        callback(argument)
