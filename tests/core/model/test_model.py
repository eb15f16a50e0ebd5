"""The nouns: what they derive, and that they can be told apart."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.events import BatchRequested, GroupSubmitted, RequestFinished
from rollout_sched.core.model.model import (
    MAX_LENGTHS,
    MAX_SIBLINGS,
    Attempt,
    DirectSiblings,
    Group,
    GroupState,
    Instance,
    LengthHistory,
    PromptLengths,
    Request,
    Segment,
    Sessions,
    Siblings,
)
from tests.core.told import LIMIT, PROMPT, Told, make_group, make_request


def make_attempt() -> Attempt:
    return Attempt(1, make_request(), Instance("i0", 0, 2, 100, 0), 0, 10, 50, 0)


def test_a_request_may_run_while_its_group_is_active_and_a_direct_one_always() -> None:
    request = make_group(requests=1).requests[0]
    assert request.group is not None
    for state in GroupState:
        request.group.state = state
        assert request.active is (state is GroupState.ACTIVE)
    request.group = None
    assert request.active


def test_a_group_is_of_the_prompt_that_is_named_or_of_one_that_comes_once() -> None:
    named = Siblings("a@2", 10, 100, "a", None, 50)
    assert Group("a@2", 0, 2, named).prompt == "a"
    assert named.expected_tokens == 50
    assert Siblings("a", 10, 100).prompt == "a"


def test_a_request_is_resumed_once_an_attempt_left_tokens() -> None:
    request = make_request()
    assert not request.resumed
    request.attempt = make_attempt()
    request.attempt.tokens = 5  # still in flight
    assert not request.resumed
    request.response_tokens = 5
    assert request.resumed


def test_objects_share_no_collections() -> None:
    one, other = make_group(requests=1), make_group(requests=1)
    one.requests[0].segments += (Segment(0, 1, "i0"),)
    one.finished.append(one.requests[0])
    one.siblings.lengths.append(1)
    assert not other.requests[0].segments
    assert not other.finished
    assert not other.siblings.lengths


def test_mutable_objects_are_compared_by_identity() -> None:
    assert make_request() != make_request()
    assert make_group() != make_group()
    assert Instance("i0", 0, 2, 100, 0) != Instance("i0", 0, 2, 100, 0)


def test_names_in_error_messages_are_short() -> None:
    group = make_group(requests=1, samples=2)
    assert repr(group) == "<Group a fresh 0/2 vNone>"
    assert repr(group.siblings) == "<Siblings a 1>"
    assert repr(group.requests[0]) == "<Request a/0 parked 0 tokens>"
    assert repr(Instance("i0", 0, 2, 100, 5)) == "<Instance i0 v5 serving 0/2>"


class TestPromptLengths:
    @pytest.mark.parametrize(("share", "length"), [(0.0, 1), (0.5, 2), (0.51, 3), (1.0, 4)])
    def test_quantile(self, share: float, length: int) -> None:
        assert PromptLengths([3, 1, 4, 2]).quantile(share) == length

    def test_the_oldest_deliveries_are_forgotten_as_a_whole(self) -> None:
        known = PromptLengths([1] * 10)
        for length in (2, 3, 4):
            known.note([length] * 10)
        assert known.ascending == [2] * 10 + [3] * 10 + [4] * 10

    def test_a_large_group_is_thinned_and_not_cut(self) -> None:
        """Those that finish last are the longest."""
        known = PromptLengths(range(100 * MAX_LENGTHS))
        assert len(known.ascending) == MAX_LENGTHS
        assert known.quantile(0.5) == pytest.approx(50 * MAX_LENGTHS, rel=0.05)
        assert known.ascending[0] < 100 < 98 * MAX_LENGTHS < known.ascending[-1]


class TestLengthHistory:
    def test_groups_of_a_prompt_share_its_lengths(self) -> None:
        history = LengthHistory()
        first, second = history.lengths_of("p"), history.lengths_of("p")
        first.note([5])
        assert second.ascending == [5]
        assert history.lengths() == {"p": [5]}

    def test_given_history_counts_for_a_new_prompt(self) -> None:
        history = LengthHistory()
        history.lengths_of("p", [5]).note([6])
        assert history.lengths_of("p", [5]).ascending == [5, 6]

    def test_a_prompt_without_a_name_is_not_kept(self) -> None:
        history = LengthHistory()
        assert history.lengths_of("", [5]).ascending == [5]
        assert not len(history)
        assert history.lengths_of("").ascending == []


def test_a_delivery_teaches_present_and_later_groups() -> None:
    told = Told(prediction="prompt_history")
    told(
        GroupSubmitted("a", 2, PROMPT, LIMIT, "p", (40,)),
        GroupSubmitted("a@2", 1, PROMPT, LIMIT, "p"),
        BatchRequested(),
        RequestFinished("a/0", 1, 7),
    )
    here = told.scheduler.state.groups["a@2"].siblings.history
    assert here.ascending == [40], "it is not delivered yet"
    told(RequestFinished("a/1", 2, 9), GroupSubmitted("a@3", 1, PROMPT, LIMIT, "p", (40,)))
    assert here.ascending == [7, 9, 40]
    assert told.scheduler.state.groups["a@3"].siblings.history is here


def join(book: DirectSiblings, name: str = "p", prompt: int = 3, limit: int = 9) -> Request:
    siblings = book.join(name, prompt, limit)
    request = Request(f"r{id(object())}", siblings, None, siblings.joined - 1, 0, prompt)
    siblings.requests.append(request)
    return request


def test_siblings_have_name_prompt_and_limit_in_common() -> None:
    book = DirectSiblings()
    one = join(book)
    assert join(book).siblings is one.siblings
    for other in (join(book, "q"), join(book, prompt=4), join(book, limit=8)):
        assert other.siblings is not one.siblings
    assert len(book) == 4


def test_each_has_an_index_of_its_own() -> None:
    book = DirectSiblings()
    first = join(book)
    join(book)
    book.leave(first)
    assert join(book).index == 2


def test_busy_name_starts_afresh_periodically() -> None:
    book = DirectSiblings()
    kept = [join(book) for _ in range(3 * MAX_SIBLINGS)]
    families: list[Siblings] = []
    for request in kept:
        if request.siblings not in families:
            families.append(request.siblings)
    assert [len(siblings.requests) for siblings in families] == [MAX_SIBLINGS] * 3
    assert len(book) == 1
    for request in kept:
        book.leave(request)
    assert len(book) == 0


def test_an_ended_session_is_forgotten() -> None:
    sessions = Sessions()
    sessions.sent("a", "i0")
    assert sessions.end("a")
    assert not sessions.end("a")
    assert sessions.last_instance("a") is None


def test_the_longest_unused_is_forgotten_first() -> None:
    sessions = Sessions(limit=2)
    sessions.sent("a", "i0")
    sessions.sent("b", "i0")
    sessions.sent("a", "i0")
    sessions.sent("c", "i0")
    assert len(sessions) == 2
    assert sessions.last_instance("b") is None
    assert sessions.last_instance("a") == "i0"


def test_moves_are_counted() -> None:
    sessions = Sessions()
    for instance in ("i0", "i0", "i1", "i0"):
        sessions.sent("a", instance)
    sessions.sent("b", "i1")
    assert sessions.moves == 2
