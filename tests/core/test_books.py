"""The books of a run that begins: what no role reads is not kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rollout_sched.config import parse_policy
from rollout_sched.core.model.model import Group, Siblings
from rollout_sched.core.parts import Books
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
