"""The life of a group: only what the table lists, and every group counted where it is."""

from __future__ import annotations

import time
from collections import Counter
from itertools import count, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_sched.core.errors import IllegalMove
from rollout_sched.core.model.model import Group, GroupState
from rollout_sched.core.state.groups import (
    ACTIVE,
    COMPLETE,
    DEFERRED,
    DELIVER,
    DELIVERED,
    FAILED,
    FILTERED,
    FRESH,
    HERE,
    LAUNCH,
    MOVES,
    SET_BACK,
    GroupMove,
    Groups,
    SampleBuffer,
)
from tests.core.told import make_group


def test_every_state_has_its_row() -> None:
    assert set(MOVES) == set(GroupState)
    assert set(HERE) == {state for state in GroupState if MOVES[state]}


def test_a_group_comes_to_exactly_one_end() -> None:
    ends = [after for row in MOVES.values() for after in row.values() if not MOVES[after]]
    assert set(ends) == {DELIVERED, FAILED, FILTERED}
    assert MOVES[COMPLETE] == {SET_BACK: DEFERRED, DELIVER: DELIVERED}, "whole, it cannot fail"


def test_a_move_that_is_not_listed_changes_nothing() -> None:
    for state, verb in product(HERE, GroupMove):
        groups, group = Groups(), make_group()
        group.state = state
        groups.add(group)
        if verb in MOVES[state]:
            groups.move(group, verb)
            assert group.state is MOVES[state][verb]
        else:
            with pytest.raises(IllegalMove, match=f"group a is {state}: it cannot {verb}"):
                groups.move(group, verb)
            assert groups.in_state(state) == [group]


def test_groups_of_a_state_are_in_order_of_arrival() -> None:
    groups = Groups()
    a, b, c = (make_group(name) for name in "abc")
    for group in (a, b, c):
        groups.add(group)
        groups.move(group, LAUNCH)
    for group in (c, a):
        groups.move(group, SET_BACK)
    assert groups.in_state(DEFERRED) == [c, a]
    assert groups.first(DEFERRED) is c
    assert groups.first(FRESH) is None
    assert groups.in_state(ACTIVE) == [b]
    assert [groups.front(DEFERRED, limit) for limit in (0, 1, 9)] == [[], [c], [c, a]]


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

    few = (
        sum(seconds_each(2_000) for _ in range(20)) / 20
    )  # one is shorter than a tick of the clock
    assert seconds_each(40_000) < 6 * few


class BruteForce(RuleBasedStateMachine):
    """The same facts kept as plain versions, and every answer computed from them anew."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = SampleBuffer()
        self.serials = count()
        self.started: dict[Group, None] = {}
        self.versions: dict[str, int] = {}
        self.complete: list[Group] = []

    @rule()
    def hold(self) -> None:
        serial = next(self.serials)
        group = make_group(f"g{serial}", serial=serial)
        self.started[group] = None
        self.buffer.add(group)

    def pick(self, data: st.DataObject, groups: list[Group]) -> Group:
        return groups[data.draw(st.integers(0, len(groups) - 1))]

    @precondition(lambda self: len(self.started) > len(self.complete))
    @rule(data=st.data(), version=st.integers(0, 4))
    def note(self, data: st.DataObject, version: int) -> None:
        group = self.pick(data, [group for group in self.started if group not in self.complete])
        self.buffer.note_version(group, version)
        self.versions[group.id] = min(version, self.versions.get(group.id, version))

    @precondition(lambda self: len(self.versions) > len(self.complete))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        dated = [g for g in self.started if g.id in self.versions and g not in self.complete]
        group = self.pick(data, dated)
        group.state = GroupState.COMPLETE
        self.buffer.completed(group)
        self.complete.append(group)

    @precondition(lambda self: self.started)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        group = self.pick(data, list(self.started))
        self.buffer.remove(group)
        del self.started[group]
        self.versions.pop(group.id, None)
        if group in self.complete:
            self.complete.remove(group)

    @invariant()
    def counts(self) -> None:
        assert (self.buffer.started, self.buffer.complete) == (
            len(self.started),
            len(self.complete),
        )
        assert self.buffer.groups() == list(self.started)

    @invariant()
    def ages(self) -> None:
        for group in self.started:
            assert group.oldest_version == self.versions.get(group.id)
        for version in range(6):
            older = self.buffer.older_than(version)
            ages = {g.id: self.versions[g.id] for g in self.started if g.id in self.versions}
            assert {group.id for group in older} == {g for g, age in ages.items() if age < version}
            assert [ages[group.id] for group in older] == sorted(ages[group.id] for group in older)

    @invariant()
    def deliveries(self) -> None:
        order = sorted(self.complete, key=lambda g: (self.versions[g.id], g.serial))
        for size in range(len(order) + 1):
            taken = self.buffer.oldest_first(size)
            assert taken == order[:size]
            left = [group for group in self.started if group not in taken]
            ages = Counter(self.versions.get(group.id, 3) for group in left)
            assert self.buffer.remaining(taken, undated=3) == dict(ages)
        for window in (1, 3):
            end = min((g.serial for g in self.started if g not in order), default=1e9) + window
            within = [group for group in order if group.serial < end]
            assert self.buffer.oldest_first(len(order), window) == within


TestBruteForce = BruteForce.TestCase


def test_answers_without_a_token_have_no_age() -> None:
    """Such a group may go, and what stays behind without an age counts as undated."""
    buffer, empty, other = SampleBuffer(), make_group("a"), make_group("b")
    for group in (empty, other):
        buffer.add(group)
    buffer.completed(empty)
    assert buffer.remaining([empty], 5) == {5: 1}
    buffer.remove(empty)
    assert buffer.remaining([], 5) == {5: 1}
