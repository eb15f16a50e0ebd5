"""Limits the rate of calls to an instance."""

from __future__ import annotations

import time

from asyncio_throttle.throttler import Throttler

from rollout_sched.core.errors import CallerError


class Throttle(Throttler):
    """At most `rate` calls in any second. Raises CallerError for a rate below one.

    `take` avoids a coroutine if the call does not have to wait.
    """

    def __init__(self, rate: int, setting: str) -> None:
        if rate < 1:
            raise CallerError(
                f"{setting} is {rate}; it must be a number of calls per second, at least 1"
            )
        super().__init__(rate_limit=rate)

    async def acquire(self) -> None:
        """Returns when the next call may be made."""
        await super().acquire()  # type: ignore[no-untyped-call]

    def take(self) -> bool:
        """Whether a call may be made now; if so, it is counted."""
        self.flush()  # type: ignore[no-untyped-call]
        if len(self._task_logs) >= self.rate_limit:
            return False
        self._task_logs.append(time.monotonic())
        return True
