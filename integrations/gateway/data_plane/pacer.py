"""Who goes first: the events of streams that run, before calls that begin or end.

Taking a call in, or seeing one off, costs as much as passing on several events. When a batch of
streams has ended together its successors begin together, and all that run would wait for each of
them. So while streams are open such work is done a call at a time, one in each iteration of the
event loop, and what has arrived for the streams is passed on in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

#: Work that may wait at once. With more the oldest is done at once, so that neither a flood of
#: calls is held in memory before it is counted, nor the first of them wait for long.
MOST_WAITING = 1024

Subject = TypeVar("Subject")

#: Called with what a call raises.
Failed = Callable[[Exception], None]


class Pacer:
    """Calls what it is given, in order: at once, or in a later iteration if `streams` are open.

    What a call raises is its own: it neither reaches who happens to be next nor stops the others.
    """

    def __init__(self) -> None:
        self.streams = 0
        self._taken = False  # this iteration has had its call
        self._waiting: deque[tuple[Callable[[Any], None], Any, Failed]] = deque()

    def take(self, do: Callable[[Subject], None], subject: Subject, failed: Failed) -> None:
        """Call `do(subject)`, and `failed` with what it raises."""
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
