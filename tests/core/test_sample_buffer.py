"""The sample buffer: the oldest go first, and an age can only grow."""

from __future__ import annotations

from collections import Counter
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_sched.core.model.model import Group
from rollout_sched.core.state.groups import SampleBuffer
from tests.core.told import make_group


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


def test_what_was_never_dispatched_counts_as_the_oldest_it_can_become() -> None:
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
