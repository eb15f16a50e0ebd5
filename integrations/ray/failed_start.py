"""An actor that could not start ends its process, so that Ray starts it again."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

#: Seconds in which who asks is still told why.
AGAIN_S = 5.0


def end_if_failed(starting: asyncio.Task[Any], end: Callable[[int], Any] = os._exit) -> None:
    """What kept it from starting may be over soon: a port that another process had, a store whose
    disk was away. A process that stays as it is would never find out."""

    def look(starting: asyncio.Task[Any]) -> None:
        error = None if starting.cancelled() else starting.exception()
        if error is not None:
            log.critical("it could not start, and is started again: %s", error)
            starting.get_loop().call_later(AGAIN_S, end, 1)

    starting.add_done_callback(look)
