"""The window of fresh groups: whatever the selection prefers, nobody is passed over for long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rollout_sched.core.errors import PolicyError
from rollout_sched.core.model.model import Group
from rollout_sched.core.model.roles import Selection
from rollout_sched.core.state.groups import FRESH, LAUNCH, Groups
from rollout_sched.core.state.selection import SelectionWindow
from tests.core.told import make_group


class Newest(Selection):
    """Prefers whoever came last, and remembers what it was shown."""

    window: int = 2

    def __init__(self, window: int = 2) -> None:
        self.window = window
        self.shown: list[tuple[str, str]] = []

    def choose(
        self, window: Sequence[Group], wanted: int, beside: Sequence[Group]
    ) -> Sequence[Group]:
        self.shown.append((names(window), names(beside)))
        return list(window)[-wanted:]


class Wrong(Newest):
    """Answers what it is told to."""

    def __init__(self, answer: Sequence[int]) -> None:
        super().__init__()
        self.answer = answer

    def choose(
        self, window: Sequence[Group], wanted: int, beside: Sequence[Group]
    ) -> Sequence[Group]:
        everyone = [*window, make_group("stranger")]
        return [everyone[place] for place in self.answer]


def names(groups: Sequence[Group]) -> str:
    return "".join(group.id for group in groups)


class Rounds:
    """Groups named by a letter each, that start two to a step."""

    def __init__(self, selection: Newest, fresh: str) -> None:
        self.groups = Groups()
        self.window = SelectionWindow(selection, self.groups, 2)
        self.submit(fresh)

    def submit(self, fresh: str) -> None:
        for letter in fresh:
            self.groups.add(make_group(letter, serial=ord(letter)))

    def start(self, wanted: int, beside: Sequence[Group] = ()) -> str:
        taken = self.window.take(wanted, beside)
        for group in taken:
            self.groups.move(group, LAUNCH)
        return names(taken)


def test_every_group_of_a_window_starts_before_the_next_is_looked_at() -> None:
    rounds = Rounds(Newest(), "abcdefghij")
    assert [rounds.start(2) for _ in range(5)] == ["cd", "ab", "gh", "ef", "ij"]


def test_late_group_waits_for_the_next_window() -> None:
    rounds = Rounds(Newest(), "abcd")
    assert rounds.start(2) == "cd"
    rounds.submit("ef")
    assert rounds.start(2) == "ab"


def test_a_window_holds_rounds_as_large_as_are_wanted() -> None:
    rounds = Rounds(Newest(), "abcdefgh")
    assert [rounds.start(3), rounds.start(3)] == ["def", "abc"]


def test_leftover_groups_start_first_and_are_filled_up() -> None:
    policy = Newest()
    rounds = Rounds(policy, "abcdefgh")
    assert [rounds.start(3), rounds.start(2), rounds.start(2)] == ["def", "bc", "ah"]
    assert policy.shown[-1] == ("gh", "a")


def test_deferred_groups_are_shown_to_the_policy() -> None:
    policy = Newest()
    rounds = Rounds(policy, "abcd")
    rounds.start(2, [make_group("z")])
    assert policy.shown == [("abcd", "z")]


def test_in_order_asks_no_policy() -> None:
    policy = Newest(window=0)
    rounds = Rounds(policy, "abcd")
    assert [rounds.start(3), rounds.start(1)] == ["abc", "d"]
    assert not policy.shown


def test_starting_all_groups_needs_no_choice() -> None:
    policy = Newest()
    assert Rounds(policy, "ab").start(2) == "ab"
    assert not policy.shown


@pytest.mark.parametrize("answer", [(0,), (0, 0), (0, 1, 2), (0, -1)])
def test_a_policy_must_choose_what_was_asked_of_it(answer: Sequence[int]) -> None:
    rounds = Rounds(Wrong(answer), "abcd")
    with pytest.raises(PolicyError, match="must choose 2 different ones"):
        rounds.window.take(2, ())
    assert rounds.groups.count(FRESH) == 4
