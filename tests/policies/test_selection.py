"""Selection: which fresh groups start together, and how far a round's lengths may be from all."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.core.model.model import Group, PromptLengths, Siblings
from rollout_sched.policies.selection import InOrder, LikeLengths


def make(serial: int, *lengths: int, expected: int = 0, max_tokens: int = 1000) -> Group:
    """A group whose prompt has this history."""
    name = str(serial)
    history = PromptLengths(lengths)
    return Group(name, serial, 1, Siblings(name, 10, max_tokens, name, history, expected))


def rounds_of(
    policy: LikeLengths, groups: Sequence[Group], size: int, beside: int = 0
) -> list[list[Group]]:
    """All the rounds of a window, one after the other, as the scheduler asks for them."""
    left, rounds = list(groups), []
    while left:
        chosen = list(policy.choose(left, size, [])) if len(left) > size else left
        rounds.append(chosen)
        left = [group for group in left if group not in chosen]
    return rounds


def lengths(groups: Sequence[Group]) -> list[int]:
    return sorted(LikeLengths().expected(group) for group in groups)


def distance(some: Sequence[int], all_: Sequence[int]) -> float:
    """Kolmogorov-Smirnov, both ascending, by its definition."""
    return max(
        abs(bisect_right(some, at) / len(some) - bisect_right(all_, at) / len(all_)) for at in all_
    )


def test_in_order() -> None:
    groups = [make(serial) for serial in range(5)]
    assert InOrder().choose(groups, 2, []) == groups[:2]


class TestLikeLengths:
    def test_without_a_bound_rounds_are_sorted(self) -> None:
        groups = [make(serial, length) for serial, length in enumerate([30, 10, 60, 20, 50, 40])]
        policy = LikeLengths(max_step_bias=1.0)
        assert [lengths(r) for r in rounds_of(policy, groups, 2)] == [[10, 20], [30, 40], [50, 60]]

    def test_longest_first_reverses_the_rounds(self) -> None:
        groups = [make(serial, length) for serial, length in enumerate([30, 10, 60, 20, 50, 40])]
        policy = LikeLengths(max_step_bias=1.0, order="longest_first")
        assert [lengths(r) for r in rounds_of(policy, groups, 2)] == [[50, 60], [30, 40], [10, 20]]

    def test_with_a_bound_short_ones_are_dealt_and_long_ones_go_together(self) -> None:
        groups = [make(serial, length) for serial, length in enumerate(range(1, 17))]
        rounds = rounds_of(LikeLengths(max_step_bias=0.5), groups, 4)
        assert [lengths(r) for r in rounds] == [
            [1, 5, 9, 10],
            [2, 6, 11, 12],
            [3, 7, 13, 14],
            [4, 8, 15, 16],
        ]

    def test_deferred_round_starts_with_the_longest(self) -> None:
        groups = [make(serial, length) for serial, length in enumerate([30, 10, 60, 20, 50, 40])]
        chosen = LikeLengths(max_step_bias=1.0).choose(groups, 2, [make(9), make(10)])
        assert lengths(chosen) == [50, 60]

    def test_deferred_groups_count_as_long(self) -> None:
        groups = [make(serial, serial + 1) for serial in range(16)]
        chosen = LikeLengths(max_step_bias=0.5).choose(groups, 2, [make(99), make(98)])
        assert lengths(chosen) == [1, 9], "the round has its share of long ones already"

    def test_equal_groups_keep_their_order(self) -> None:
        groups = [make(serial) for serial in range(8)]
        for bias in (0.0, 0.5, 1.0):
            chosen = LikeLengths(max_step_bias=bias).choose(groups, 8 - 1, [])
            assert len({group.id for group in chosen}) == 7
        rounds = rounds_of(LikeLengths(max_step_bias=1.0), groups, 4)
        assert [[g.serial for g in r] for r in rounds] == [[0, 1, 2, 3], [4, 5, 6, 7]]

    @pytest.mark.parametrize(
        ("group", "expected"),
        [
            (make(0, 5, 9, 7, expected=3), 9),
            (make(0, expected=300), 300),
            (make(0), 1000),
            (make(0, 5000), 1000),
            (make(0, expected=5000), 1000),
            (make(0, 0), 0),
            (Group("direct", 0, 1, Siblings("direct", 10, 1000)), 1000),
        ],
    )
    def test_expected_length_of_a_prompt(self, group: Group, expected: int) -> None:
        assert LikeLengths().expected(group) == expected

    def test_the_quantile_says_which_of_the_earlier_lengths_counts(self) -> None:
        assert LikeLengths(quantile=0.5).expected(make(0, 5, 9, 7, 1)) == 5

    @given(
        data=st.lists(st.integers(1, 60), min_size=64, max_size=64),
        size=st.sampled_from([4, 8, 16, 32]),
        bias=st.floats(0, 1),
        order=st.sampled_from(["shortest_first", "longest_first"]),
    )
    def test_no_round_is_further_from_its_window_than_the_bound(
        self, data: list[int], size: int, bias: float, order: str
    ) -> None:
        """By more than one group's share, and every group starts exactly once."""
        groups = [make(serial, length) for serial, length in enumerate(data)]
        policy = LikeLengths(max_step_bias=bias, order=order)  # type: ignore[arg-type]
        rounds = rounds_of(policy, groups, size)
        assert sorted(g.serial for r in rounds for g in r) == list(range(64))
        for chosen in rounds:
            assert distance(lengths(chosen), sorted(data)) <= bias + 1 / size + 1e-9

    def test_the_bound_holds_for_the_lengths_themselves_in_expectation(self) -> None:
        """What is expected to be longer is longer by chance only, and that suffices."""
        rng = np.random.default_rng(7)
        window, size, bias = 256, 32, 0.25
        steps: list[list[int]] = [[] for _ in range(window // size)]
        everything: list[int] = []
        for _ in range(40):
            effects = rng.normal(7, 0.8, window)
            earlier = np.exp(effects[:, None] + rng.normal(0, 0.5, (window, 4))).astype(int)
            made = np.exp(effects[:, None] + rng.normal(0, 0.5, (window, 4))).astype(int)
            groups = [make(n, *map(int, row), max_tokens=10**6) for n, row in enumerate(earlier)]
            rounds = rounds_of(LikeLengths(max_step_bias=bias), groups, size)
            for step, chosen in zip(steps, rounds, strict=True):
                step.extend(int(n) for group in chosen for n in made[group.serial])
            everything.extend(map(int, made.ravel()))
        everything.sort()
        distances = [distance(sorted(step), everything[::20]) for step in steps]
        assert max(distances) <= bias
        assert max(distances) > bias / 3, "or the bound would not be needed"
