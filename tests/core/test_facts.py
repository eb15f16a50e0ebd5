"""What is recorded of each event: what it has changed, and no more."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_sched.core.model.events import (
    BatchRequested,
    Event,
    GroupSubmitted,
    InstanceReported,
    RequestFailed,
    RequestFinished,
    RequestSubmitted,
    Restored,
    TokensArrived,
)
from rollout_sched.core.model.records import PromptFacts
from rollout_sched.core.restart.facts import Changes, FactRecorder, FoldedFacts, state_of
from tests.core.told import LIMIT, PROMPT, Told

HISTORY = {"use": "prompt_history", "quantile": 0.5}


class Recorded:
    """A scheduler and what is recorded of it; answers with the changes since the last answer."""

    def __init__(self, told: Told) -> None:
        self.told = told
        self.recorder = FactRecorder(told.scheduler)
        self.folded = FoldedFacts()

    def __call__(self, *events: Event) -> Changes:
        for event in events:
            self.recorder.observe(self.told.seconds, event, self.told(event))
        changes = self.recorder.changes()
        assert changes is not None
        self.folded.add(changes)
        assert self.folded.state == state_of(self.told.scheduler, self.told.seconds)
        return changes


def names(changes: Changes) -> list[str]:
    return [facts.group for facts in changes.groups]


def submitted(*groups: str) -> Sequence[GroupSubmitted]:
    return [GroupSubmitted(group, 1, PROMPT, LIMIT) for group in groups]


def test_an_event_changes_its_own_group_and_no_other() -> None:
    recorded = Recorded(Told(2))
    assert names(recorded(*submitted("a", "b"))) == ["a", "b"]
    assert names(recorded(BatchRequested())) == ["a", "b"]  # they are launched
    assert names(recorded(TokensArrived("b/0", 2, 4))) == ["b"]
    assert names(recorded(InstanceReported("i0", 2, 0, 0.1))) == []


def test_nothing_has_changed_before_anything_has_happened() -> None:
    assert FactRecorder(Told().scheduler).changes() is None


def test_who_is_delivered_is_gone_and_the_batch_is_told() -> None:
    recorded = Recorded(Told(1))
    recorded(*submitted("a", "b"), BatchRequested())
    changes = recorded(RequestFinished("a/0", 1, 5))
    assert changes.gone == ("a",)
    assert [deliver.batch for deliver in changes.delivered] == [0]
    recorded(BatchRequested())
    assert recorded(RequestFailed("b/0", 2, "poison", "request")).gone == ("b",)


def test_who_came_and_went_between_two_looks_is_gone() -> None:
    recorded = Recorded(Told(1))
    changes = recorded(BatchRequested(), *submitted("a"), RequestFinished("a/0", 1, 5))
    assert (names(changes), changes.gone) == ([], ("a",))


def test_a_name_that_comes_again_at_once_is_here() -> None:
    recorded = Recorded(Told(1))
    recorded(BatchRequested(), *submitted("a"))
    changes = recorded(RequestFinished("a/0", 1, 5), *submitted("a"))
    assert (names(changes), changes.gone) == (["a"], ())


def test_a_delivery_teaches_about_its_prompt() -> None:
    recorded = Recorded(Told(1, prediction=HISTORY))
    first = GroupSubmitted("a", 1, PROMPT, LIMIT, "p", (4,))
    assert recorded(BatchRequested(), first).prompts == (PromptFacts("p", ((4,),)),)
    changes = recorded(RequestFinished("a/0", 1, 5))
    assert changes.prompts == (PromptFacts("p", ((4,), (5,))),)


def test_a_direct_request_changes_nothing_of_a_group() -> None:
    recorded = Recorded(Told(1))
    changes = recorded(RequestSubmitted("d", "", PROMPT, LIMIT), TokensArrived("d", 1, 3))
    assert (changes.groups, changes.gone) == ((), ())


def test_what_is_restored_is_recorded_anew() -> None:
    earlier = Recorded(Told(2, prediction=HISTORY))
    earlier(GroupSubmitted("a", 1, PROMPT, LIMIT, "p", (4,)), BatchRequested())
    state = earlier.folded.state
    changes = Recorded(Told(2, instances=0, prediction=HISTORY))(Restored(state))
    assert (changes.groups, changes.prompts) == (state.groups, state.prompts)
