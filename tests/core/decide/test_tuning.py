"""Parameters that change while a policy runs: from the next time it is asked on, and only these."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.core.model.events import BatchRequested, Restored, Retuned
from rollout_sched.core.model.records import RunFacts, RunState
from rollout_sched.core.restart.facts import state_of
from tests.core.told import Told


def launched(told: Told) -> int:
    """Groups that start with the next request."""
    for number in range(8):
        told.submit(f"g{number}")
    told(BatchRequested())
    return len(told.running)


@pytest.mark.parametrize(("over", "starts"), [(1.0, 2), (1.5, 3), (2.0, 4)])
def test_a_round_starts_as_many_as_it_was_told_last(over: float, starts: int) -> None:
    told = Told(2, batching="sync")
    assert told(Retuned({"batching": {"over_prompts": over}})) == []
    assert launched(told) == starts
    assert told.scheduler.view.tuned == {"batching": {"over_prompts": over}}


def test_who_asks_the_other_roles_asks_the_new_ones() -> None:
    told = Told(
        migration={"use": "by_cost"}, lending={"use": "stage_fusion"}, selection="like_lengths"
    )
    told(
        Retuned(
            {
                "migration": {"margin": 9.0},
                "lending": {"whole": 0.25},
                "selection": {"quantile": 0.5},
            }
        )
    )
    scheduler: Any = told.scheduler
    assert scheduler.decider.migrator.migration is scheduler.roles.migration
    assert scheduler.decider.lender.lending is scheduler.roles.lending
    assert scheduler.books.selection_window.selection is scheduler.roles.selection
    assert (scheduler.roles.migration.margin, scheduler.roles.migration.most) == (9.0, 2)
    assert (scheduler.roles.lending.whole, scheduler.roles.selection.quantile) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"freshness": {"max_staleness": 9}}, "freshness cannot change during a run"),
        ({"lending": {"whole": 0.5}}, "parameters that can: none"),
        ({"batching": {"part_prompts": 1}}, "parameters that can: over_prompts"),
        ({"batching": {"over_prompts": 0.5}}, "batching of Sync: .*>= 1"),
    ],
)
def test_what_cannot_be_changed_changes_nothing(parameters: Any, says: str) -> None:
    told = Told(2, batching="sync")
    with pytest.raises(CallerError, match=says):
        told(Retuned({"batching": {"over_prompts": 2.0}, **parameters}))
    assert told.scheduler.view.tuned == {}
    assert launched(told) == 2


def test_a_scheduler_that_follows_goes_on_with_them() -> None:
    first = Told(2, batching="sync")
    first(Retuned({"batching": {"over_prompts": 2.0}}))
    state = state_of(first.scheduler, first.seconds)
    second = Told(2, instances=0, batching="sync")
    second(Restored(state))
    assert second.scheduler.view.tuned == {"batching": {"over_prompts": 2.0}}


def test_a_policy_file_that_has_become_another_one_has_its_own() -> None:
    told = Told(2, instances=0, batching="fully_async")
    told(Restored(RunState(RunFacts(tuned={"batching": {"over_prompts": 2.0}}))))
    assert told.scheduler.view.tuned == {}
