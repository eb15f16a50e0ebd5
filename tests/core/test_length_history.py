"""The history of lengths by prompt: fed by deliveries, begun with what was known before."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.events import BatchRequested, GroupSubmitted, RequestFinished
from rollout_sched.core.model.model import MOST_LENGTHS, LengthHistory, PromptLengths
from tests.core.told import LIMIT, PROMPT, Told


class TestPromptLengths:
    @pytest.mark.parametrize(("share", "length"), [(0.0, 1), (0.5, 2), (0.51, 3), (1.0, 4)])
    def test_quantile(self, share: float, length: int) -> None:
        assert PromptLengths([3, 1, 4, 2]).quantile(share) == length

    def test_a_quantile_of_nothing(self) -> None:
        assert PromptLengths().quantile(0.5) is None

    def test_the_oldest_deliveries_are_forgotten_as_a_whole(self) -> None:
        known = PromptLengths([1] * 10)
        for length in (2, 3, 4):
            known.note([length] * 10)
        assert known.ascending == [2] * 10 + [3] * 10 + [4] * 10

    def test_a_large_group_is_thinned_and_not_cut(self) -> None:
        """Those that finish last are the longest."""
        known = PromptLengths(range(100 * MOST_LENGTHS))
        assert len(known.ascending) == MOST_LENGTHS
        assert known.quantile(0.5) == pytest.approx(50 * MOST_LENGTHS, rel=0.05)
        assert known.ascending[0] < 100 < 98 * MOST_LENGTHS < known.ascending[-1]


class TestLengthHistory:
    def test_groups_of_a_prompt_share_what_is_known(self) -> None:
        history = LengthHistory()
        first, second = history.of("p"), history.of("p")
        first.note([5])
        assert second.ascending == [5]
        assert history.lengths() == {"p": [5]}

    def test_what_was_known_before_counts_when_the_prompt_is_new(self) -> None:
        history = LengthHistory()
        history.of("p", [5]).note([6])
        assert history.of("p", [5]).ascending == [5, 6]

    def test_a_prompt_without_a_name_is_not_kept(self) -> None:
        history = LengthHistory()
        assert history.of("", [5]).ascending == [5]
        assert not len(history)
        assert history.of("").ascending == []


def test_a_delivery_teaches_the_groups_that_are_here_and_those_that_come() -> None:
    told = Told(prediction="prompt_history")
    told(
        GroupSubmitted("a", 2, PROMPT, LIMIT, "p", (40,)),
        GroupSubmitted("a@2", 1, PROMPT, LIMIT, "p"),
        BatchRequested(),
        RequestFinished("a/0", 1, 7),
    )
    here = told.scheduler.books.groups["a@2"].siblings.history
    assert here is not None
    assert here.ascending == [40], "it is not delivered yet"
    told(RequestFinished("a/1", 2, 9), GroupSubmitted("a@3", 1, PROMPT, LIMIT, "p", (40,)))
    assert here.ascending == [7, 9, 40]
    assert told.scheduler.books.groups["a@3"].siblings.history is here
