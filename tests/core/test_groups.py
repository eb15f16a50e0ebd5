"""The life of a group: only what the table lists, and every group counted where it is."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.core.model.errors import IllegalMove
from rollout_sched.core.model.model import GroupState
from rollout_sched.core.state.groups import (
    ACTIVE,
    COMPLETE,
    DEFERRED,
    DELIVER,
    DELIVERED,
    FAIL,
    FAILED,
    FILL,
    FILTERED,
    FRESH,
    HERE,
    LAUNCH,
    MOVES,
    SET_BACK,
    GroupMove,
    Groups,
)
from tests.core.told import make_group


def test_every_state_has_its_row() -> None:
    assert set(MOVES) == set(GroupState)
    assert set(HERE) == {state for state in GroupState if MOVES[state]}


def test_a_group_comes_to_exactly_one_end() -> None:
    ends = [after for row in MOVES.values() for after in row.values() if not MOVES[after]]
    assert set(ends) == {DELIVERED, FAILED, FILTERED}
    assert MOVES[COMPLETE] == {SET_BACK: DEFERRED, DELIVER: DELIVERED}, "whole, it cannot fail"


@pytest.mark.parametrize("verb", GroupMove)
@pytest.mark.parametrize("state", HERE)
def test_a_move_that_is_not_listed_changes_nothing(state: GroupState, verb: GroupMove) -> None:
    groups, group = Groups(), make_group()
    group.state = state
    groups.add(group)
    if verb in MOVES[state]:
        groups.move(group, verb)
        assert group.state is MOVES[state][verb]
    else:
        with pytest.raises(IllegalMove, match=f"group a is {state}: it cannot {verb}"):
            groups.move(group, verb)
        assert groups.of(state) == [group]


def test_those_of_a_state_come_in_the_order_they_came_to_it() -> None:
    groups = Groups()
    a, b, c = (make_group(name) for name in "abc")
    for group in (a, b, c):
        groups.add(group)
        groups.move(group, LAUNCH)
    for group in (c, a):
        groups.move(group, SET_BACK)
    assert groups.of(DEFERRED) == [c, a]
    assert groups.first(DEFERRED) is c
    assert groups.first(FRESH) is None
    assert groups.of(ACTIVE) == [b]
    assert [groups.front(DEFERRED, most) for most in (0, 1, 9)] == [[], [c], [c, a]]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(GroupMove)), max_size=40))
def test_counts_are_those_of_the_groups(moves: list[tuple[int, GroupMove]]) -> None:
    groups = Groups()
    everyone = [make_group(name) for name in "abcd"]
    for group in everyone:
        groups.add(group)
    for number, verb in moves:
        group = everyone[number]
        if verb in MOVES[group.state]:
            groups.move(group, verb)
    for state in HERE:
        assert groups.count(state) == sum(group.state is state for group in everyone)
    here = [group for group in everyone if group.state in HERE]
    assert list(groups) == here
    assert len(groups) == len(here)
    assert all((group.id in groups) == (group in here) for group in everyone)


def test_what_has_ended_is_forgotten() -> None:
    groups = Groups()
    for name, end in (("a", FAIL), ("b", DELIVER)):
        groups.add(group := make_group(name))
        groups.move(group, LAUNCH)
        if end is DELIVER:
            groups.move(group, FILL)
        groups.move(group, end)
        assert name not in groups
    assert len(groups) == 0


def test_the_first_of_many_is_found_as_fast_as_that_of_a_few() -> None:
    """They leave from the front, and a plain dict keeps the holes: 40,000 took 6.5 us each."""

    def seconds_each(count: int) -> float:
        groups = Groups()
        for number in range(count):
            groups.add(make_group(str(number)))
        start = time.process_time()
        for _ in range(count):
            group = groups.first(FRESH)
            assert group is not None
            groups.move(group, LAUNCH)
        return (time.process_time() - start) / count

    few = min(seconds_each(2_000) for _ in range(3))
    assert seconds_each(40_000) < 6 * few
