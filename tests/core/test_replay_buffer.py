"""The replay buffer: parked requests in the order they came, leaving group by group."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.model import RequestState
from rollout_sched.core.state.waiting import ReplayBuffer
from tests.core.told import make_group, make_request


def test_requests_stay_in_the_order_they_came() -> None:
    buffer = ReplayBuffer()
    for name in ("b/1", "a/0", "b/0"):
        buffer.add(make_request(name))
    assert [request.id for request in buffer] == ["b/1", "a/0", "b/0"]
    assert len(buffer) == 3


def test_of_a_group_in_index_order_and_nobody_elses() -> None:
    one, other = make_group("a", requests=3), make_group("b", requests=1)
    buffer = ReplayBuffer()
    one.requests[1].state = RequestState.RUNNING
    for request in (one.requests[2], other.requests[0], one.requests[0]):
        buffer.add(request)
    assert buffer.of(one) == [one.requests[0], one.requests[2]]
    assert buffer.of(other) == [other.requests[0]]


def test_what_is_removed_is_gone() -> None:
    buffer, request = ReplayBuffer(), make_request()
    assert request not in buffer
    buffer.add(request)
    assert request in buffer
    buffer.remove(request)
    assert request not in buffer
    assert not buffer
    with pytest.raises(KeyError):
        buffer.remove(request)
