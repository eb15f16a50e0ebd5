"""Gives events of running streams priority over calls that begin or end.

Starting or ending a call costs as much as passing on several events. When many streams end
together, their successors begin together, and all running streams would wait for each of them. So
while streams are open, one such call is processed per iteration of the event loop, and events that
have arrived for the streams are passed on in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

#: Most calls that may wait. Beyond this the oldest runs immediately, so that a flood of calls is
#: not held in memory before it is counted, and the first calls do not wait long.
MOST_WAITING = 1024

Subject = TypeVar("Subject")

#: Called with the exception that a call raises.
Failed = Callable[[Exception], None]


class Pacer:
    """Calls functions in order: at once, or in a later iteration while `streams` are open.

    An exception of one call does not reach the next caller and does not stop the other calls.
    """

    def __init__(self) -> None:
        self.streams = 0
        self._taken = False  # a call has run in this iteration
        self._waiting: deque[tuple[Callable[[Any], None], Any, Failed]] = deque()

    def take(self, do: Callable[[Subject], None], subject: Subject, failed: Failed) -> None:
        """Call `do(subject)`, and `failed` with the exception that it raises."""
        if self._taken:
            self._waiting.append((do, subject, failed))
            if len(self._waiting) > MOST_WAITING:
                self._do_oldest()
            return
        if self.streams:
            self._taken = True
            asyncio.get_running_loop().call_soon(self._next)
        self._do(do, subject, failed)

    def _next(self) -> None:
        self._taken = bool(self._waiting)
        if self._taken:
            asyncio.get_running_loop().call_soon(self._next)
            self._do_oldest()

    def _do_oldest(self) -> None:
        do, subject, failed = self._waiting.popleft()
        self._do(do, subject, failed)

    def _do(self, do: Callable[[Any], None], subject: Any, failed: Failed) -> None:
        try:
            do(subject)
        except Exception as error:
            try:
                failed(error)
            except Exception:
                log.exception("a call could not be ended")
