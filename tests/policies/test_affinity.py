"""Who of a session goes back to its KV."""

from __future__ import annotations

import pytest

from rollout_sched.policies import affinity, routing
from tests.helpers import Loads, make_request


def loads(ahead: int) -> Loads:
    made = Loads(routing.LeastRequests(), 2)
    made.send(0, ahead)
    return made


@pytest.mark.parametrize(("ahead", "stays"), [(0, True), (2, True), (3, False)])
def test_it_stays_within_the_margin(ahead: int, stays: bool) -> None:
    fleet = loads(ahead)
    policy = affinity.ByCost(margin=2)
    assert policy.stays(make_request(context=1), fleet[0], fleet[1]) is stays


@pytest.mark.parametrize(
    # Three ahead save 3 * 0.125 s of waiting; at 1000 tokens/s that is worth 375 tokens.
    ("context", "stays"),
    [(374, False), (375, True), (376, True)],
)
def test_it_leaves_only_if_the_wait_saved_exceeds_the_prefill(context: int, stays: bool) -> None:
    fleet = loads(3)
    policy = affinity.ByCost(margin=0, prefill_tokens_per_s=1000.0, wait_s=0.125)
    assert policy.stays(make_request(context=context), fleet[0], fleet[1]) is stays


def test_it_stays_though_elsewhere_is_fuller() -> None:
    fleet = loads(5)
    assert affinity.ByCost(margin=0).stays(make_request(), fleet[1], fleet[0])


def test_ignored_is_ignored() -> None:
    fleet = loads(0)
    assert not affinity.NoAffinity().keeps_sessions
    assert not affinity.NoAffinity().stays(make_request(), fleet[0], fleet[1])
