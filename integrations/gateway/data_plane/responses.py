"""Counts how calls ended, by status, and optionally logs a line for each."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("rollout_sched.access")

#: nginx's status for a client that disconnected before it had its answer.
CLIENT_LEFT = 499


class Responses:
    """`by_status` counts ended calls. 4xx are the client's fault, 5xx are not. A stream counts with
    the status that it would have had if its end had been known at its beginning.

    `logs`: write a line per call to the access log, without the query, which may contain keys.
    """

    __slots__ = ("_logs", "by_status")

    def __init__(self, *, logs: bool = False) -> None:
        self.by_status: dict[int, int] = {}
        self._logs = logs

    def begin(self) -> float:
        """The value to pass to `end`: the time of the beginning."""
        return time.monotonic() if self._logs else 0.0

    def end(self, method: bytes, target: bytes, status: int, begun: float) -> None:
        """A call has ended, answered or not."""
        self.by_status[status] = self.by_status.get(status, 0) + 1
        if self._logs:
            self._say(method.decode(), target.partition(b"?")[0].decode("latin-1"), status, begun)

    def _say(self, method: str, path: str, status: int, begun: float) -> None:
        seconds = time.monotonic() - begun
        fields = {"method": method, "path": path, "status": status, "duration_s": seconds}
        log.info("%s %s %d %.3f s", method, path, status, seconds, extra={"fields": fields})
