"""Who has paused an instance, as a table of moves.

A pause belongs to its maker: an administrator's pause outlasts our updates and the instance's
restarts, we end our own, and somebody else's is left alone. A move that the table does not list is
an error and changes nothing.

An instance that joins paused, and was not paused by us, stays paused, because another scheduler may
be loading weights into it. The same holds if a restart was noticed only after a pause: it is
unknown who paused. An instance that wrongly stays away is visible; one that wrongly generates while
its weights are loaded is not.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from rollout_sched.core.errors import IllegalMove


class PausedBy(StrEnum):
    """Whose pause it is; nothing is generated until all of them have ended it."""

    NOBODY = "nobody"
    US = "us"  # for an update; or we have to resume it when it joins
    ADMINISTRATOR = "an administrator"
    BOTH = "an administrator and us"
    SOMEBODY_ELSE = "somebody else"  # found paused


NOBODY, US, ADMINISTRATOR, BOTH, SOMEBODY_ELSE = PausedBy


class PauseMove(StrEnum):
    """The verbs of the table."""

    PAUSE = "be paused by us"  # an update begins; it may be paused even without an answer
    RESUME = "be resumed by us"  # an update is over, or it is about to join
    HOLD = "be held"  # an administrator has paused it
    RELEASE = "be released"  # an administrator has resumed it
    RELEASE_LATER = "be released later"  # it is away: we resume it when it joins
    FIND = "be found paused"  # by somebody else
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
    # If it is released while we update it, we still have to resume it; its gauges may not change.
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
    # Our own update replaces their pause: two parties cannot load weights at once.
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
    """The pause of one instance.

    on_resumed  called when it was resumed or restarted, so that we no longer have to resume it
    on_found    called with True when it is found paused by somebody else, with False when that
                pause is over, or is replaced by ours or an administrator's
    """

    def __init__(
        self,
        name: str,
        on_resumed: Callable[[], None] = lambda: None,
        on_found: Callable[[bool], None] = lambda found: None,
    ) -> None:
        self.by: PausedBy = NOBODY
        self._name = name
        self._on_resumed = on_resumed
        self._on_found = on_found

    @property
    def held(self) -> bool:
        """Whether an administrator has paused it, even if others have too."""
        return self.by in (ADMINISTRATOR, BOTH)

    @property
    def ours(self) -> bool:
        """Whether we have to resume it, now or after it is released."""
        return self.by in (US, BOTH)

    def move(self, verb: PauseMove) -> None:
        """Move it, or raise IllegalMove and leave it as it is."""
        after = MOVES[self.by].get(verb)
        if after is None:
            raise IllegalMove(f"instance {self._name} is paused by {self.by}: it cannot {verb}")
        before, self.by = self.by, after
        if (before is SOMEBODY_ELSE) is not (after is SOMEBODY_ELSE):
            self._on_found(after is SOMEBODY_ELSE)
        if verb in (RESUME, RESTART):
            self._on_resumed()
