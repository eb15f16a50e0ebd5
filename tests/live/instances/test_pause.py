"""Who has paused an instance: the whole table, and what is not in it."""

from __future__ import annotations

from itertools import product

import pytest

from rollout_sched.core.errors import IllegalMove
from rollout_sched.live.instances.pause import MOVES, InstancePause, PausedBy, PauseMove

#: The table, written a second time: a line for each state, a column for each move; "-": illegal.
NAMES = {
    "nobody": PausedBy.NOBODY,
    "us": PausedBy.US,
    "admin": PausedBy.ADMINISTRATOR,
    "both": PausedBy.BOTH,
    "other": PausedBy.SOMEBODY_ELSE,
}
LEGAL = """
         PAUSE  RESUME  HOLD   RELEASE  RELEASE_LATER  FIND   RESTART
nobody   us     nobody  admin  nobody   -              other  nobody
us       -      nobody  both   us       -              -      nobody
admin    both   admin   admin  nobody   us             -      admin
both     -      admin   both   us       us             -      admin
other    us     nobody  admin  nobody   -              other  nobody
"""
VERBS, *LINES = (line.split() for line in LEGAL.strip().splitlines())
TABLE = {
    (NAMES[line[0]], PauseMove[verb]): NAMES[after]
    for line in LINES
    for verb, after in zip(VERBS, line[1:], strict=True)
    if after != "-"
}


def test_every_move_is_in_the_table_or_changes_nothing() -> None:
    for before, verb in product(PausedBy, PauseMove):
        pause = InstancePause("i0")
        pause.by = before
        if (before, verb) in TABLE:
            pause.move(verb)
        else:
            with pytest.raises(IllegalMove, match=f"i0 is paused by {before}: it cannot {verb}"):
                pause.move(verb)
        assert pause.by is TABLE.get((before, verb), before)


def test_the_table_names_every_state_and_every_move() -> None:
    assert set(MOVES) == set(PausedBy)
    assert {verb for moves in MOVES.values() for verb in moves} == set(PauseMove)


@pytest.mark.parametrize("by", PausedBy)
def test_only_an_administrator_ends_what_an_administrator_holds(by: PausedBy) -> None:
    pause = InstancePause("i0")
    pause.by = by
    for verb, after in MOVES[by].items():
        after_held = after in (PausedBy.ADMINISTRATOR, PausedBy.BOTH)
        if verb in (PauseMove.RELEASE, PauseMove.RELEASE_LATER):
            assert not after_held
        else:
            assert after_held is (pause.held or verb is PauseMove.HOLD)


@pytest.mark.parametrize("by", PausedBy)
def test_resume_or_restart_ends_our_pause(by: PausedBy) -> None:
    for verb in (PauseMove.RESUME, PauseMove.RESTART):
        pause = InstancePause("i0")
        pause.by = by
        pause.move(verb)
        assert not pause.ours
        assert pause.by is not PausedBy.SOMEBODY_ELSE


def test_end_of_our_pause_is_reported() -> None:
    told: list[str] = []
    pause = InstancePause("i0", lambda: told.append(pause.by))
    for verb in (PauseMove.PAUSE, PauseMove.RELEASE):
        pause.move(verb)
        assert told == []
    pause.move(PauseMove.RESUME)
    pause.move(PauseMove.PAUSE)
    pause.move(PauseMove.RESTART)
    assert told == [PausedBy.NOBODY] * 2
