"""A bound on how often an instance is called."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import asyncio_throttle

from rollout_sched.core.errors import CallerError

#: Awaited before a call; returns when the call may be made.
Throttle = Callable[[], Awaitable[None]]


def throttle(rate: int, setting: str) -> Throttle:
    """At most `rate` calls in any second. Raises CallerError for a rate below one."""
    if rate < 1:
        raise CallerError(f"{setting} is {rate}; it is a number of calls per second, at least 1")
    acquire: Throttle = asyncio_throttle.Throttler(rate_limit=rate).acquire  # type: ignore[attr-defined]
    return acquire
