"""Calls counted against what may be here at once."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.gateway.data_plane.body import BadRequest
from rollout_sched.integrations.gateway.data_plane.reply import Limits, OpenCalls, Unavailable


class Reply:
    def fail(self, status: int, text: str) -> None: ...


def test_who_leaves_makes_room_for_the_next() -> None:
    calls, one, two = OpenCalls(Limits(requests=3, body_bytes=100)), Reply(), Reply()
    calls.enter(one, 2, 60)
    calls.enter(two, 1, 40)
    assert (calls.requests, calls.body_bytes, list(calls.replies)) == (3, 100, [one, two])
    with pytest.raises(Unavailable, match="3 responses are pending, the limit is 3"):
        calls.check_room(1, 0)
    calls.leave(two, 1, 40)
    calls.check_room(1, 40)
    with pytest.raises(Unavailable, match="pending bodies have 60, the limit is 100"):
        calls.check_room(1, 41)
    calls.leave(one, 2, 60)
    assert (calls.requests, calls.body_bytes, list(calls.replies)) == (0, 0, [])


def test_replies_are_in_the_order_in_which_they_came() -> None:
    """Who waits is told in that order, which is the same in each process."""
    calls, replies = OpenCalls(Limits()), [Reply() for _ in range(50)]
    for reply in replies:
        calls.enter(reply, 1, 0)
    assert list(calls.replies) == replies


def test_what_would_never_fit_is_told_so() -> None:
    calls = OpenCalls(Limits(body_bytes=100))
    calls.check_room(1, 100)
    with pytest.raises(BadRequest, match="ask for fewer responses") as caught:
        calls.check_room(2, 101)
    assert caught.value.status == 413
