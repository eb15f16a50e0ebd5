"""The parts that say what becomes of work: they order by one list, in the order of what happens."""

from __future__ import annotations

from rollout_sched.config import parse_policy
from rollout_sched.core.model.actions import Action, Discard, Wake
from rollout_sched.core.model.model import Siblings
from rollout_sched.core.parts import Books, Work


def work_of(out: list[Action], *, max_failures: int = 5, backoff_s: float = 2.0) -> Work:
    roles = parse_policy("test", {}).build(seed=0)
    return Work(roles, Books(roles, 1, 0), max_failures, backoff_s, out)


def test_what_they_order_is_in_one_list() -> None:
    out: list[Action] = []
    work = work_of(out)
    request = work.requests.create(Siblings("", 10, 100), None, 0, "d")
    work.requests.wait(request)
    work.backoff.rest(request, 0, now=1.0)
    work.outcomes.end_direct(request, "withdrawn")
    assert [type(action) for action in out] == [Wake, Discard]
    assert out[0] == Wake(3.0)
    assert len(work.requests) == 0


def test_groups_are_lost_by_the_same_books() -> None:
    work = work_of([], max_failures=2)
    assert work.outcomes.groups is work.group_outcomes
    assert work.outcomes.max_failures == 2
