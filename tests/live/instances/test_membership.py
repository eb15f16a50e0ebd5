"""Whether an instance belongs to the fleet: the whole table, and what is not in it."""

from __future__ import annotations

from itertools import product

import pytest

from rollout_sched.core.errors import IllegalMove
from rollout_sched.live.instances.membership import (
    AWAY,
    DISQUALIFY,
    JOIN,
    JOINED,
    LOSE,
    MOVES,
    REFUSE,
    REMOVE,
    RESTART,
    UNFIT,
    Membership,
    MembershipMove,
    MembershipState,
)

#: The table as prose, written a second time: from, verb, to.
LEGAL = """
away    join        joined
away    refuse      away
away    disqualify  unfit
away    remove      removed
joined  lose        away
joined  disqualify  unfit
joined  remove      removed
unfit   refuse      unfit
unfit   restart     away
unfit   remove      removed
"""
TABLE = {
    (MembershipState(before), MembershipMove(verb)): MembershipState(after)
    for before, verb, after in map(str.split, LEGAL.strip().splitlines())
}


def test_every_move_is_in_the_table_or_changes_nothing() -> None:
    assert set(MOVES) == set(MembershipState)
    for before, verb in product(MembershipState, MembershipMove):
        membership = Membership("i0")
        membership.state, membership.reason = before, "as it was"
        drained = membership.drained.is_set()
        if after := TABLE.get((before, verb)):
            membership.move(verb, "because")
            assert membership.state is after
            assert membership.drained.is_set() is (after is not JOINED)
        else:
            with pytest.raises(IllegalMove, match=f"i0 is {before}: it cannot {verb}"):
                membership.move(verb, "because")
            assert (membership.state, membership.reason) == (before, "as it was")
            assert membership.drained.is_set() is drained


def test_the_reason_is_why_it_has_not_joined() -> None:
    membership = Membership("i0")
    assert membership.reason
    membership.move(REFUSE, "connection refused")
    assert membership.reason == "connection refused"
    membership.move(JOIN)
    assert membership.reason == ""
    membership.move(LOSE, "it was restarted")
    assert membership.reason == "it was restarted"


def test_reason_stays_while_unfit() -> None:
    membership = Membership("i0")
    membership.move(DISQUALIFY, "500 from reload_weights")
    membership.move(REFUSE, "connection refused")
    assert (membership.state, membership.reason) == (UNFIT, "500 from reload_weights")
    membership.move(RESTART, "it was restarted")
    membership.move(REFUSE, "it serves another model")
    assert (membership.state, membership.reason) == (AWAY, "it serves another model")


def test_rejoining_resets_drained() -> None:
    membership = Membership("i0")
    membership.move(JOIN)
    membership.drained.set()
    membership.move(LOSE, "gone")
    assert membership.drained.is_set()
    membership.move(JOIN)
    assert not membership.drained.is_set()
    membership.move(REMOVE)
    assert membership.drained.is_set()
