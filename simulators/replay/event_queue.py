"""Virtual time: a heap of (time, serial, deed), as in SimPy; equal times keep their order."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Deed = Callable[[Any], None]


class Clockwork:
    """The clock of a simulation. `now` is in seconds and never goes back."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Deed, Any]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time: float, deed: Deed, argument: Any = None) -> None:
        """Do `deed(argument)` at `time`, or now if that has passed."""
        self._serial += 1
        now = self.now
        heappush(self._heap, (time if time > now else now, self._serial, deed, argument))

    def after(self, seconds: float, deed: Deed, argument: Any = None) -> None:
        self.at(self.now + seconds, deed, argument)

    def clear(self) -> None:
        """Forget everything that was to be done."""
        self._heap.clear()

    def step(self) -> None:
        """Go to the next deed and do it. Raises IndexError if there is none."""
        self.now, _, deed, argument = heappop(self._heap)
        deed(argument)
