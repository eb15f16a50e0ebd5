"""Who rests after a failure, and who has rested."""

from __future__ import annotations

from heapq import heappop, heappush

from rollout_sched.core.actions import Action, Wake
from rollout_sched.core.model import Instance, Request

#: A rest is doubled for each failure in a row, so often at most.
MOST_DOUBLINGS = 6


class Backoff:
    """Instances and requests that rest until `rests_until`, earliest first.

    `first_s`: seconds of the first rest in a row.
    """

    def __init__(self, first_s: float, out: list[Action]) -> None:
        self.first_s = first_s
        self._out = out
        self._rests: list[tuple[float, int, Instance | Request]] = []
        self._serial = 0
        self._wake_at = float("inf")

    def rest(self, who: Instance | Request, before: int, now: float) -> None:
        """Let `who` rest, who has rested `before` times in a row."""
        at = now + self.first_s * 2 ** min(before, MOST_DOUBLINGS)
        who.rests_until = at
        self._serial += 1
        heappush(self._rests, (at, self._serial, who))
        if at < self._wake_at:
            self._wake(at)

    def wake(self, now: float) -> list[Instance | Request]:
        """Those whose rest is over by now; they rest no longer.

        A clock may ring a hair too early: nobody must be forgotten.
        """
        over: list[Instance | Request] = []
        while self._rests and self._rests[0][0] <= now:
            at, _, who = heappop(self._rests)
            if who.rests_until == at:  # else it was let go earlier
                who.rests_until = 0.0
                over.append(who)
        self._wake_at = float("inf")
        if self._rests:
            self._wake(self._rests[0][0])
        return over

    def _wake(self, at: float) -> None:
        self._wake_at = at
        self._out.append(Wake(at))
