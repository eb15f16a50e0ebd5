"""Inputs of a simulated instance that take effect at the next boundary between two steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any


class Inbox:
    """The inputs in the order of arrival; `due` is the time of the first, infinite if none.

    Aborts also have a faster path: an abort during a step applies before the step's results.
    `aborts` has the candidates for that, (time, attempt).
    """

    __slots__ = ("_posts", "aborts", "count", "due", "now")

    def __init__(self) -> None:
        self.now = -math.inf
        self.due = math.inf
        self.count = 0
        self._posts: deque[tuple[float, Callable[[Any], None], Any]] = deque()
        self.aborts: deque[tuple[float, int]] = deque()

    def clock(self, now: float) -> None:
        """Raises ValueError if now is before an earlier call."""
        if now < self.now:
            raise ValueError(f"time went back from {self.now} to {now}")
        self.now = now

    def post(self, take_effect: Callable[[Any], None], argument: Any = None) -> None:
        """Call `take_effect(argument)` at the next boundary."""
        self.count += 1
        if not self._posts:
            self.due = self.now
        self._posts.append((self.now, take_effect, argument))

    def take(self) -> None:
        """The first input takes effect; there must be one."""
        _, take_effect, argument = self._posts.popleft()
        self.due = self._posts[0][0] if self._posts else math.inf
        take_effect(argument)

    def post_abort(self, take_effect: Callable[[Any], None], attempt: int) -> None:
        self.post(take_effect, attempt)
        self.aborts.append((self.now, attempt))

    def aborts_within(self, end: float) -> list[int]:
        """The attempts whose aborts came before the end of this step, each returned once."""
        aborts, found = self.aborts, []
        while aborts and aborts[0][0] < end:
            found.append(aborts.popleft()[1])
        return found

    def forget_aborts(self, at: float) -> None:
        """Aborts that came by `at` take effect as normal inputs."""
        while self.aborts and self.aborts[0][0] <= at:
            self.aborts.popleft()
