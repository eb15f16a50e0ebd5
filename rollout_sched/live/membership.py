"""Whether an instance belongs to the fleet, as a table.

A move that the table does not list is an error and changes nothing. Reading down: an instance is
AWAY until it *joins* and again when it is *lost*; one whose weights could not be loaded is
*disqualified* and must be *restarted* first, for what it would generate is anybody's guess. Who may
not join yet is *refused*, with a reason. It is *removed* at most once.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum

from rollout_sched.core.errors import IllegalMove


class MembershipState(StrEnum):
    """What an instance is to the scheduler."""

    AWAY = "away"
    JOINED = "joined"
    UNFIT = "unfit"
    REMOVED = "removed"


AWAY, JOINED, UNFIT, REMOVED = MembershipState


class MembershipMove(StrEnum):
    """The verbs of the table."""

    JOIN = "join"  # it answers, and nothing speaks against it
    REFUSE = "refuse"  # it does not answer, or something speaks against it
    LOSE = "lose"  # it fails an order, misses polls, was restarted, stands still
    DISQUALIFY = "disqualify"  # its weights could not be loaded
    RESTART = "restart"  # it has the weights of its start again
    REMOVE = "remove"


JOIN, REFUSE, LOSE, DISQUALIFY, RESTART, REMOVE = MembershipMove

MOVES: dict[MembershipState, dict[MembershipMove, MembershipState]] = {
    # An update that was called off when the instance was lost may still fail.
    AWAY: {JOIN: JOINED, REFUSE: AWAY, DISQUALIFY: UNFIT, REMOVE: REMOVED},
    JOINED: {LOSE: AWAY, DISQUALIFY: UNFIT, REMOVE: REMOVED},
    UNFIT: {REFUSE: UNFIT, RESTART: AWAY, REMOVE: REMOVED},
    REMOVED: {},
}


class Membership:
    """One instance's.

    reason   why it has not joined; "" while it has
    drained  the scheduler has no work there: it has not joined, or has finished what it had
    """

    def __init__(self, name: str) -> None:
        self.state: MembershipState = AWAY
        self.reason = "it has not answered yet"
        self.drained = asyncio.Event()
        self.drained.set()
        self._name = name

    def move(self, verb: MembershipMove, reason: str = "") -> None:
        """Move it, or raise IllegalMove and leave it as it is.

        `reason`: why it has not joined from now on; what made it unfit stays the reason while it
        is, whatever else it is refused for.
        """
        after = MOVES[self.state].get(verb)
        if after is None:
            raise IllegalMove(f"instance {self._name} is {self.state}: it cannot {verb}")
        if after is not UNFIT or self.state is not UNFIT:
            self.reason = reason
        self.state = after
        if after is JOINED:
            self.drained.clear()
        else:
            self.drained.set()
