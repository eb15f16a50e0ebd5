"""Ends the process of an actor that could not start, so that Ray restarts it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

#: Seconds until the process ends; callers still get the error meanwhile.
AGAIN_S = 5.0


def end_if_failed(starting: asyncio.Task[Any], end: Callable[[int], Any] = os._exit) -> None:
    """End the process if `starting` fails. The cause may be temporary: a port that another process
    holds, a store whose disk is not mounted. Without a restart the actor would stay failed."""

    def look(starting: asyncio.Task[Any]) -> None:
        error = None if starting.cancelled() else starting.exception()
        if error is not None:
            log.critical("the actor could not start and is restarted: %s", error)
            starting.get_loop().call_later(AGAIN_S, end, 1)

    starting.add_done_callback(look)
