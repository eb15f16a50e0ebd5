"""The nouns: what they derive, and that they can be told apart."""

from __future__ import annotations

from rollout_sched.core.model.model import (
    Attempt,
    Group,
    GroupState,
    Instance,
    RequestState,
    Segment,
    Siblings,
)
from tests.core.told import make_group, make_request


def make_attempt() -> Attempt:
    return Attempt(1, make_request(), Instance("i0", 0, 2, 100, 0), 0, 10, 50, 0)


def test_an_instance_counts_what_it_holds() -> None:
    instance = Instance("i0", 0, 2, 100, 0)
    assert instance.in_flight == 0
    instance.attempts[1] = make_attempt()
    assert instance.in_flight == 1


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


def test_known_tokens_include_those_of_the_running_attempt() -> None:
    request = make_request()
    request.response_tokens = 7
    assert request.known_tokens == 7
    request.attempt = make_attempt()
    request.attempt.tokens = 5
    assert request.known_tokens == 12


def test_a_request_begins_parked() -> None:
    assert make_request().state is RequestState.PARKED


def test_books_of_two_objects_are_not_shared() -> None:
    one, other = make_group(requests=1), make_group(requests=1)
    one.requests[0].segments += (Segment(0, 1, "i0"),)
    one.finished.append(one.requests[0])
    one.siblings.lengths.append(1)
    assert not other.requests[0].segments
    assert not other.finished
    assert not other.siblings.lengths


def test_what_changes_is_compared_by_identity() -> None:
    assert make_request() != make_request()
    assert make_group() != make_group()
    assert Instance("i0", 0, 2, 100, 0) != Instance("i0", 0, 2, 100, 0)


def test_names_in_error_messages_are_short() -> None:
    group = make_group(requests=1, samples=2)
    assert repr(group) == "<Group a fresh 0/2 vNone>"
    assert repr(group.siblings) == "<Siblings a 1>"
    assert repr(group.requests[0]) == "<Request a/0 parked 0 tokens>"
    assert repr(Instance("i0", 0, 2, 100, 5)) == "<Instance i0 v5 serving 0/2>"
