"""How calls ended, by status; and, where it is wanted, a line for each of them."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("rollout_sched.access")

#: nginx's status for a client that has left before it had its answer.
CLIENT_LEFT = 499


class Responses:
    """`by_status` counts calls that are over. 4xx are of the client's making, 5xx are not; that of
    a stream is what it would have been answered had its end been known at its beginning.

    `logs`: each gets a line in the access log, without its query, for keys may stand there.
    """

    __slots__ = ("_logs", "by_status")

    def __init__(self, *, logs: bool = False) -> None:
        self.by_status: dict[int, int] = {}
        self._logs = logs

    def begin(self) -> float:
        """What `end` wants to know of the beginning."""
        return time.monotonic() if self._logs else 0.0

    def end(self, method: bytes, target: bytes, status: int, begun: float) -> None:
        """A call is over, answered or not."""
        self.by_status[status] = self.by_status.get(status, 0) + 1
        if self._logs:
            self._say(method.decode(), target.partition(b"?")[0].decode("latin-1"), status, begun)

    def _say(self, method: str, path: str, status: int, begun: float) -> None:
        seconds = time.monotonic() - begun
        fields = {"method": method, "path": path, "status": status, "duration_s": seconds}
        log.info("%s %s %d %.3f s", method, path, status, seconds, extra={"fields": fields})
