"""The state at the start of a run: what no role reads is not kept."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.model import Group, Siblings
from tests.core.told import make_parts


def test_a_run_begins_empty_at_its_version() -> None:
    state = make_parts(2, version=3).state
    assert (state.progress.version, state.progress.missing, state.serials.last) == (3, 2, 0)
    assert not state.anomalies
    assert not state.orders
    assert not len(state.groups) + len(state.sessions) + len(state.siblings)


def test_progress_is_a_view_of_the_groups() -> None:
    state = make_parts().state
    state.groups.add(Group("a", 1, 1, Siblings("a", 10, 100)))
    assert state.progress.fresh == 1


@pytest.mark.parametrize("use", ["group_history", "prompt_history"])
def test_lengths_of_prompts_are_kept_if_a_role_uses_them(use: str) -> None:
    kept = make_parts(prediction={"use": use}).state.prompt_lengths
    assert (kept is None) == (use == "group_history")
