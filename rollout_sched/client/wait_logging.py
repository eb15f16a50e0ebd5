"""Logs why a wait takes long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from rollout_sched.core.model.errors import RolloutError

log = logging.getLogger(__name__)

#: Seconds until the reason is first checked and logged, and between two checks.
LOOK_S = 5.0


@contextlib.asynccontextmanager
async def log_while_waiting(what: str, why: Callable[[], Awaitable[str]]) -> AsyncIterator[None]:
    """While the block waits for `what`, log the reason that `why` returns whenever it changes; ""
    is not logged."""
    saying = asyncio.create_task(_say(what, why))
    try:
        yield
    finally:
        saying.cancel()


async def _say(what: str, why: Callable[[], Awaitable[str]]) -> None:
    said = ""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            reason = await why()
        except RolloutError as error:
            reason = str(error)
        if reason and reason != said:
            log.warning("still waiting for %s: %s", what, reason)
        said = reason
