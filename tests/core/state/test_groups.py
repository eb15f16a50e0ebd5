"""The life of a group: only what the table lists, and every group counted where it is."""

from __future__ import annotations

import time
from collections import Counter
from itertools import count, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_sched.core.model.errors import IllegalMove
from rollout_sched.core.model.model import Group, GroupState
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


def test_ended_group_is_forgotten() -> None:
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

    few = (
        sum(seconds_each(2_000) for _ in range(20)) / 20
    )  # one is shorter than a tick of the clock
    assert seconds_each(40_000) < 6 * few


def fill(**versions: int | None) -> tuple[SampleBuffer, list[Group]]:
    """A buffer that holds groups with these oldest versions, launched in this order."""
    buffer, groups = SampleBuffer(), []
    for serial, (name, version) in enumerate(versions.items()):
        groups.append(group := make_group(name, serial=serial))
        buffer.add(group)
        if version is not None:
            buffer.note_version(group, version)
    return buffer, groups


def names(groups: list[Group]) -> str:
    return "".join(group.id for group in groups)


def test_the_oldest_complete_groups_go_first() -> None:
    buffer, groups = fill(a=3, b=1, c=2, d=0)
    for group in groups[:3]:
        buffer.completed(group)
    assert names(buffer.oldest_first(3)) == "bca"
    assert names(buffer.oldest_first(2)) == "bc"


def test_among_equals_the_first_submitted_goes_first() -> None:
    buffer, groups = fill(a=1, b=1, c=1)
    for group in reversed(groups):
        buffer.completed(group)
    assert names(buffer.oldest_first(3)) == "abc"


def test_more_than_there_are_is_all_there_are() -> None:
    buffer, (group, _) = fill(a=1, b=1)
    buffer.completed(group)
    assert names(buffer.oldest_first(5)) == "a"


def test_the_oldest_version_only_falls() -> None:
    buffer, (group,) = fill(a=None)
    assert group.oldest_version is None
    for version, oldest in [(5, 5), (7, 5), (5, 5), (2, 2), (3, 2)]:
        buffer.note_version(group, version)
        assert group.oldest_version == oldest
        assert buffer.remaining([], 9) == {oldest: 1}


def test_older_than_is_strict_and_sorted_by_version() -> None:
    buffer, _ = fill(a=3, b=1, c=None, d=2, e=1)
    assert names(buffer.older_than(3)) == "bed"
    assert names(buffer.older_than(2)) == "be"
    assert buffer.older_than(1) == []


def test_a_finished_group_grows_old_like_any_other() -> None:
    buffer, (group,) = fill(a=1)
    buffer.completed(group)
    assert buffer.older_than(2) == [group]


def test_undispatched_group_counts_as_the_oldest_possible() -> None:
    buffer, _ = fill(a=4, b=None, c=None)
    assert buffer.remaining([], undated=2) == {2: 2, 4: 1}
    assert buffer.remaining([], undated=4) == {4: 3}


def test_remaining_leaves_out_what_is_taken() -> None:
    buffer, (a, b, _) = fill(a=1, b=2, c=2)
    assert buffer.remaining([a, b], undated=0) == {2: 1}
    assert buffer.started == 3, "only asking"


def test_a_released_group_is_forgotten() -> None:
    buffer, (a, b) = fill(a=1, b=1)
    buffer.completed(a)
    buffer.remove(a)
    assert a not in buffer
    assert a.oldest_version is None
    assert (buffer.started, buffer.complete) == (1, 0)
    assert buffer.groups() == buffer.older_than(2) == [b]


def test_a_group_that_was_never_dispatched_can_be_released() -> None:
    buffer, (group,) = fill(a=None)
    buffer.remove(group)
    assert buffer.started == 0


def test_groups_are_listed_in_order_of_launch() -> None:
    buffer, _ = fill(c=2, a=0, b=1)
    assert names(buffer.groups()) == "cab"


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
            older = {g.id for g in self.started if self.versions.get(g.id, 99) < version}
            assert {group.id for group in self.buffer.older_than(version)} == older

    @invariant()
    def deliveries(self) -> None:
        order = sorted(self.complete, key=lambda g: (self.versions[g.id], g.serial))
        for size in range(len(order) + 1):
            taken = self.buffer.oldest_first(size)
            assert taken == order[:size]
            left = [group for group in self.started if group not in taken]
            ages = Counter(self.versions.get(group.id, 3) for group in left)
            assert self.buffer.remaining(taken, undated=3) == dict(ages)


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
