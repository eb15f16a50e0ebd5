"""Whether an instance belongs to the fleet, as a table of moves.

A move that the table does not list is an error and changes nothing. An instance is AWAY until it
*joins*, and again when it is *lost*. An instance whose weights could not be loaded is
*disqualified* and must be *restarted* first, because its weights are undefined. An instance that
may not join yet is *refused*, with a reason. It is *removed* at most once.

                join             weights that could not be loaded
      AWAY ─────────────▶ JOINED ────────────────────────────────▶ UNFIT
       ▲ ▲      lose        │                                        │
       │ └──────────────────┘                restart                 │
       └─────────────────────────────────────────────────────────────┘

UNFIT, because vLLM leaves a model half torn down when a load fails.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum

from rollout_sched.core.errors import IllegalMove


class MembershipState(StrEnum):
    """The states of an instance."""

    AWAY = "away"
    JOINED = "joined"
    UNFIT = "unfit"
    REMOVED = "removed"


AWAY, JOINED, UNFIT, REMOVED = MembershipState


class MembershipMove(StrEnum):
    """The verbs of the table."""

    JOIN = "join"  # it answers and may join
    REFUSE = "refuse"  # it does not answer, or may not join
    LOSE = "lose"  # it failed an order, missed polls, was restarted, or makes no progress
    DISQUALIFY = "disqualify"  # its weights could not be loaded
    RESTART = "restart"  # it has its start weights again
    REMOVE = "remove"


JOIN, REFUSE, LOSE, DISQUALIFY, RESTART, REMOVE = MembershipMove

MOVES: dict[MembershipState, dict[MembershipMove, MembershipState]] = {
    # An update that was cancelled when the instance was lost may still fail.
    AWAY: {JOIN: JOINED, REFUSE: AWAY, DISQUALIFY: UNFIT, REMOVE: REMOVED},
    JOINED: {LOSE: AWAY, DISQUALIFY: UNFIT, REMOVE: REMOVED},
    UNFIT: {REFUSE: UNFIT, RESTART: AWAY, REMOVE: REMOVED},
    REMOVED: {},
}


class Membership:
    """The membership of one instance.

    reason   why it has not joined; "" while it has
    drained  set when the scheduler has no work on it: not joined, or all its work is finished
    """

    def __init__(self, name: str) -> None:
        self.state: MembershipState = AWAY
        self.reason = "it has not answered yet"
        self.drained = asyncio.Event()
        self.drained.set()
        self._name = name

    def move(self, verb: MembershipMove, reason: str = "") -> None:
        """Move it, or raise IllegalMove and leave it as it is.

        `reason`: why it has not joined from now on. While it is unfit, the reason that made it
        unfit stays.
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
