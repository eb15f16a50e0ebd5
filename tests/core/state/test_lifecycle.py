"""The life of a request: the whole table, and what is not in it."""

from __future__ import annotations

from itertools import product

import pytest

from rollout_sched.core.errors import IllegalMove
from rollout_sched.core.model.model import RequestState
from rollout_sched.core.state.lifecycle import MOVES, Move, move
from tests.core.told import make_request
from tests.helpers import fields_of

#: The table as prose, written a second time: from, verb, to.
LEGAL = """
parked        return     waiting
parked        finish     finished
parked        end        ended
waiting       dispatch   running
waiting       park       parked
waiting       finish     finished
waiting       end        ended
running       interrupt  interrupting
running       return     waiting
running       park       parked
running       act        acting
running       finish     finished
running       end        ended
interrupting  return     waiting
interrupting  park       parked
interrupting  act        acting
interrupting  finish     finished
interrupting  end        ended
acting        return     waiting
acting        park       parked
acting        finish     finished
acting        end        ended
finished      park       parked
finished      end        ended
"""
TABLE = {
    (RequestState(before), Move(verb)): RequestState(after)
    for before, verb, after in map(str.split, LEGAL.strip().splitlines())
}


def test_every_move_is_in_the_table_or_changes_nothing() -> None:
    assert set(MOVES) == set(RequestState)
    for before, verb in product(RequestState, Move):
        request = make_request()
        request.state = before
        if (before, verb) in TABLE:
            move(request, verb)
            assert request.state is TABLE[before, verb]
        else:
            facts = fields_of(request)
            with pytest.raises(IllegalMove, match=rf"a/0 is {before}: it cannot {verb}"):
                move(request, verb)
            assert fields_of(request) == facts


def test_a_new_request_can_come_to_every_state() -> None:
    reached, frontier = set(), [make_request().state]
    while frontier:
        state = frontier.pop()
        reached.add(state)
        frontier += [after for after in MOVES[state].values() if after not in reached]
    assert reached == set(RequestState)


def test_the_end_is_in_reach_of_every_state_and_is_final() -> None:
    assert MOVES[RequestState.ENDED] == {}
    for state in RequestState:
        if state is not RequestState.ENDED:
            assert MOVES[state][Move.END] is RequestState.ENDED
