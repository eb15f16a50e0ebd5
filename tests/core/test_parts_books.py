"""The books of a run that begins: what no role reads is not kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rollout_sched.config import parse_policy
from rollout_sched.core.model.actions import Action, Discard, Wake
from rollout_sched.core.model.model import Group, Siblings
from rollout_sched.core.parts import Books, Work
from rollout_sched.core.state.groups import Groups


def books_of(prompts_per_step: int = 2, version: int = 0, **roles: Mapping[str, Any]) -> Books:
    return Books(parse_policy("test", roles).build(seed=0), prompts_per_step, version)


def test_it_begins_empty_at_its_version() -> None:
    books = books_of(version=3)
    assert (books.progress.version, books.progress.missing, books.serials.last) == (3, 2, 0)
    assert not books.anomalies
    assert not len(books.groups) + len(books.sessions) + len(books.siblings)


def test_progress_is_a_view_of_the_groups_that_are_here() -> None:
    books = books_of()
    books.groups.add(Group("a", 1, 1, Siblings("a", 10, 100)))
    assert books.progress.fresh == 1
    assert isinstance(books.groups, Groups)


@pytest.mark.parametrize("use", ["group_history", "prompt_history"])
def test_lengths_of_prompts_are_kept_for_who_looks_at_them(use: str) -> None:
    kept = books_of(prediction={"use": use}).prompt_lengths
    assert (kept is None) == (use == "group_history")


# -- The parts that say what becomes of work: they order by one list, in the order of what happ --


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
