"""Ordering: which of some waiting requests each policy puts first."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.model.model import Request
from rollout_sched.core.state.waiting import WaitingQueue
from rollout_sched.policies import ordering
from tests.helpers import make_request


def request(serial: int, made: int, expected: int) -> Request:
    made_one = make_request(made=made)
    made_one.id, made_one.serial, made_one.expected_tokens = f"r{serial}", serial, expected
    return made_one


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (ordering.Fifo(), ["r1", "r2", "r3", "r4"]),
        # Remainders are 50, 90, 50, 10.
        (ordering.LongestFirst(), ["r2", "r1", "r3", "r4"]),
        (ordering.ShortestFirst(), ["r4", "r1", "r3", "r2"]),
        (ordering.ResumedFirst(), ["r3", "r4", "r1", "r2"]),
    ],
)
def test_queue_is_ordered(policy: Any, order: list[str]) -> None:
    queue = WaitingQueue()
    requests = [request(1, 0, 50), request(2, 0, 90), request(3, 50, 100), request(4, 90, 100)]
    for waiting in reversed(requests):
        queue.add(waiting, policy.key(waiting))
    assert [waiting.id for waiting in queue] == order


def test_longest_first_sorts_by_remaining_tokens() -> None:
    policy = ordering.LongestFirst()
    nearly_done, short = request(1, 950, 1000), request(2, 0, 100)
    assert policy.key(short) < policy.key(nearly_done)
