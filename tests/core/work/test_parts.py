"""The parts of a scheduler share one state, and order by its one list."""

from __future__ import annotations

from rollout_sched.core.model.actions import Discard, Wake
from rollout_sched.core.model.model import Siblings
from tests.core.told import make_parts


def test_orders_of_all_parts_are_in_one_list() -> None:
    parts = make_parts(backoff_s=2.0)
    request = parts.requests.create(Siblings("", 10, 100), None, 0, "d")
    parts.requests.wait(request)
    parts.backoff.rest(request, 0, now=1.0)
    parts.outcomes.end_direct(request, "withdrawn")
    assert [type(action) for action in parts.state.orders] == [Wake, Discard]
    assert parts.state.orders[0] == Wake(3.0)
    assert len(parts.requests) == 0


def test_outcomes_of_requests_and_groups_are_the_same_parts() -> None:
    parts = make_parts(max_failures=2)
    assert parts.outcomes.groups is parts.group_outcomes
    assert parts.outcomes.max_failures == 2
