"""Who has paused an instance, as a table.

A pause belongs to who made it: an administrator's outlasts our updates and the instance's restarts,
our own is ours to end, and somebody else's is left alone. A move that the table does not list is an
error and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from rollout_sched.core.errors import IllegalMove


class PausedBy(StrEnum):
    """Whose pause it is; nothing is generated until all of them have ended it."""

    NOBODY = "nobody"
    US = "us"  # for an update; or it is left to us to resume it when it joins
    ADMINISTRATOR = "an administrator"
    BOTH = "an administrator and us"
    SOMEBODY_ELSE = "somebody else"  # found so


NOBODY, US, ADMINISTRATOR, BOTH, SOMEBODY_ELSE = PausedBy


class PauseMove(StrEnum):
    """The verbs of the table."""

    PAUSE = "be paused by us"  # an update begins; that it did not answer does not mean it was not
    RESUME = "be resumed by us"  # an update is over, or it is about to join
    HOLD = "be held"  # an administrator has paused it
    RELEASE = "be released"  # an administrator has resumed it
    RELEASE_LATER = "be released later"  # it is away: we resume it when it joins
    FIND = "be found paused"  # and not by us
    RESTART = "be restarted"  # a new process is not paused


PAUSE, RESUME, HOLD, RELEASE, RELEASE_LATER, FIND, RESTART = PauseMove

MOVES: dict[PausedBy, dict[PauseMove, PausedBy]] = {
    NOBODY: {
        PAUSE: US,
        RESUME: NOBODY,
        HOLD: ADMINISTRATOR,
        RELEASE: NOBODY,
        FIND: SOMEBODY_ELSE,
        RESTART: NOBODY,
    },
    # Released while we update it, it is still ours to resume, and its gauges may stand still.
    US: {RESUME: NOBODY, HOLD: BOTH, RELEASE: US, RESTART: NOBODY},
    ADMINISTRATOR: {
        PAUSE: BOTH,
        RESUME: ADMINISTRATOR,
        HOLD: ADMINISTRATOR,
        RELEASE: NOBODY,
        RELEASE_LATER: US,
        RESTART: ADMINISTRATOR,  # it is paused again before it joins
    },
    BOTH: {
        RESUME: ADMINISTRATOR,
        HOLD: BOTH,
        RELEASE: US,
        RELEASE_LATER: US,
        RESTART: ADMINISTRATOR,
    },
    # An update of ours that begins then ends theirs: two cannot load weights at once.
    SOMEBODY_ELSE: {
        PAUSE: US,
        RESUME: NOBODY,
        HOLD: ADMINISTRATOR,
        RELEASE: NOBODY,
        FIND: SOMEBODY_ELSE,
        RESTART: NOBODY,
    },
}


class InstancePause:
    """One instance's. `on_resumed` is called when it has been resumed, or restarted: it is no
    longer ours to resume."""

    def __init__(self, name: str, on_resumed: Callable[[], None] | None = None) -> None:
        self.by: PausedBy = NOBODY
        self._name = name
        self._on_resumed = on_resumed

    @property
    def held(self) -> bool:
        """By an administrator, whoever else has paused it."""
        return self.by in (ADMINISTRATOR, BOTH)

    @property
    def ours(self) -> bool:
        """Whether we are to resume it, or would if it were not held."""
        return self.by in (US, BOTH)

    def move(self, verb: PauseMove) -> None:
        """Move it, or raise IllegalMove and leave it as it is."""
        after = MOVES[self.by].get(verb)
        if after is None:
            raise IllegalMove(f"instance {self._name} is paused by {self.by}: it cannot {verb}")
        self.by = after
        if verb in (RESUME, RESTART) and self._on_resumed is not None:
            self._on_resumed()
