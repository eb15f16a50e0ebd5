"""Rests after failures: which instances and requests rest, and until when."""

from __future__ import annotations

from heapq import heappop, heappush

from rollout_sched.core.actions import Action, Wake
from rollout_sched.core.model import Instance, Request

#: Each failure in a row doubles the rest, at most this many times.
MOST_DOUBLINGS = 6


class Backoff:
    """Instances and requests that rest until `rests_until`, earliest first.

    `first_s`: length of the first rest, in seconds.
    """

    def __init__(self, first_s: float, out: list[Action]) -> None:
        self.first_s = first_s
        self._out = out
        self._rests: list[tuple[float, int, Instance | Request]] = []
        self._serial = 0
        self._wake_at = float("inf")

    def rest(self, who: Instance | Request, before: int, now: float) -> None:
        """Start a rest of `who`, after `before` earlier rests in a row."""
        at = now + self.first_s * 2 ** min(before, MOST_DOUBLINGS)
        who.rests_until = at
        self._serial += 1
        heappush(self._rests, (at, self._serial, who))
        if at < self._wake_at:
            self._wake(at)

    def wake(self, now: float) -> list[Instance | Request]:
        """Return those whose rest is over, and end their rest.

        A timer may fire slightly too early: those still resting get another Wake.
        """
        over: list[Instance | Request] = []
        while self._rests and self._rests[0][0] <= now:
            at, _, who = heappop(self._rests)
            if who.rests_until == at:  # else its rest ended earlier
                who.rests_until = 0.0
                over.append(who)
        self._wake_at = float("inf")
        if self._rests:
            self._wake(self._rests[0][0])
        return over

    def _wake(self, at: float) -> None:
        self._wake_at = at
        self._out.append(Wake(at))
