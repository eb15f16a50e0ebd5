"""What is recorded of each event: what it has changed, and no more."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_sched.core.model.events import (
    BatchRequested,
    Event,
    GroupSubmitted,
    InstanceLost,
    InstanceReported,
    RequestFailed,
    RequestFinished,
    RequestSubmitted,
    Restored,
    TokensArrived,
    ToolReturned,
    TurnFinished,
    WeightsPublished,
)
from rollout_sched.core.model.records import (
    DeliveredGroup,
    GroupFacts,
    Launch,
    PromptFacts,
    RequestFacts,
    Segment,
)
from rollout_sched.core.restart.facts import Changes, FactRecorder, FoldedFacts, state_of
from tests.core.told import FULLY_ASYNC, LIMIT, PROMPT, Told, begun

HISTORY = {"use": "prompt_history", "quantile": 0.5}
RECENT = {"use": "tail_batching", "over_prompts": 1.5, "least_gain": 0.1}


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


def test_delivered_group_is_gone_and_its_batch_recorded() -> None:
    recorded = Recorded(Told(1))
    recorded(*submitted("a", "b"), BatchRequested())
    changes = recorded(RequestFinished("a/0", 1, 5))
    assert changes.dropped == ("a",)
    assert [deliver.batch for deliver in changes.delivered] == [0]
    recorded(BatchRequested())
    assert recorded(RequestFailed("b/0", 2, "poison", "request")).dropped == ("b",)


def test_group_that_came_and_went_is_gone() -> None:
    recorded = Recorded(Told(1))
    changes = recorded(BatchRequested(), *submitted("a"), RequestFinished("a/0", 1, 5))
    assert (names(changes), changes.dropped) == ([], ("a",))


def test_a_name_that_comes_again_at_once_is_here() -> None:
    recorded = Recorded(Told(1))
    recorded(BatchRequested(), *submitted("a"))
    changes = recorded(RequestFinished("a/0", 1, 5), *submitted("a"))
    assert (names(changes), changes.dropped) == (["a"], ())


def test_a_delivery_teaches_about_its_prompt() -> None:
    recorded = Recorded(Told(1, prediction=HISTORY))
    first = GroupSubmitted("a", 1, PROMPT, LIMIT, "p", (4,))
    assert recorded(BatchRequested(), first).prompts == (PromptFacts("p", ((4,),)),)
    changes = recorded(RequestFinished("a/0", 1, 5))
    assert changes.prompts == (PromptFacts("p", ((4,), (5,))),)


def test_a_direct_request_changes_nothing_of_a_group() -> None:
    recorded = Recorded(Told(1))
    changes = recorded(RequestSubmitted("d", "", PROMPT, LIMIT), TokensArrived("d", 1, 3))
    assert (changes.groups, changes.dropped) == ((), ())


def test_an_event_changes_the_groups_of_what_it_starts() -> None:
    recorded = Recorded(Told(slots=1, **FULLY_ASYNC))
    assert names(recorded(*submitted("a", "b"))) == ["a", "b"]
    assert names(recorded(RequestFinished("a/0", 1, 5))) == ["a", "b"]


def test_delivered_lengths_are_recorded_for_a_policy_that_reads_them() -> None:
    recorded = Recorded(Told(batching=RECENT))
    recorded(*submitted("a", "b"), BatchRequested())
    delivered = (DeliveredGroup(PROMPT, (5,)),)
    assert recorded(RequestFinished("a/0", 1, 5)).recent == delivered
    assert recorded(BatchRequested()).recent is None
    following = Recorded(Told(instances=0, batching=RECENT))
    assert following(Restored(recorded.folded.state)).recent == delivered


def test_restored_state_is_recorded_again() -> None:
    earlier = Recorded(Told(2, prediction=HISTORY))
    earlier(GroupSubmitted("a", 1, PROMPT, LIMIT, "p", (4,)), BatchRequested())
    state = earlier.folded.state
    changes = Recorded(Told(2, instances=0, prediction=HISTORY))(Restored(state))
    assert (changes.groups, changes.prompts) == (state.groups, state.prompts)


PARTIAL = {"use": "partial", "at_update": "in_place"}


def group_of(told: Told, name: str = "a") -> GroupFacts:
    return next(facts for facts in state_of(told.scheduler, 0.0).groups if facts.group == name)


def request_of(told: Told) -> RequestFacts:
    (request,) = group_of(told).requests
    return request


def test_a_fresh_group_is_as_submitted() -> None:
    told = Told(instances=0, prediction=HISTORY)
    told(GroupSubmitted("a", 2, PROMPT, LIMIT, "p", (4, 3), 7))
    told(GroupSubmitted("b", 1, PROMPT, LIMIT, history=(5,)))
    state = state_of(told.scheduler, 2.0)
    assert state.groups == (
        GroupFacts("a", 1, 2, PROMPT, LIMIT, "p", 7),
        GroupFacts("b", 2, 1, PROMPT, LIMIT, "b", history=((5,),)),
    )
    assert state.prompts == (PromptFacts("p", ((3, 4),)),)
    assert state.run.now == 2.0


def test_streamed_tokens_are_recorded_as_after_a_loss() -> None:
    told = begun("a", interruption=PARTIAL)
    told(TokensArrived("a/0", 1, 7))
    before = state_of(told.scheduler, 0.0).groups
    assert request_of(told) == RequestFacts(
        0, 2, "waiting", (Segment(0, 7, "i0"),), 0, 17, salt=0, last_attempt=1, last_instance="i0"
    )
    told(InstanceLost("i0"))
    assert state_of(told.scheduler, 0.0).groups == before


def test_a_tool_at_work_and_what_it_has_said() -> None:
    told = begun("a")
    told(TurnFinished("a/0", 1, 5))
    assert (request_of(told).state, request_of(told).turn) == ("acting", 1)
    told(ToolReturned("a/0", 1, 20))
    request = request_of(told)
    assert (request.state, request.observed_tokens) == ("waiting", 20)
    assert request.last_attempt == 2


def test_resting_request_waits_and_spent_request_is_parked() -> None:
    told = begun("a", instances=2)
    told(RequestFailed("a/0", 1), RequestFailed("a/0", 2))
    assert told.request("a/0").rests_until
    assert request_of(told).state == "waiting"
    spent = Told(1, interruption={"use": "partial", "segment_tokens": 30})
    spent.submit("a", samples=2)
    spent(BatchRequested(), RequestFinished("a/0", 1, 30, reason="length"))
    assert [request.state for request in group_of(spent).requests] == ["parked", "waiting"]


def test_the_counters_of_a_run() -> None:
    told = Told(prompts_per_step=1)
    told.submit("a", "b")
    told(BatchRequested(), RequestFinished("a/0", 1, 5), WeightsPublished(1))
    run = state_of(told.scheduler, 3.0).run
    assert (run.batches, run.delivered, run.version) == (1, 1, 1)
    assert (run.trainer_waiting, run.whole_at, run.attempts) == (False, 0, 1)
    told(BatchRequested(parts=True))
    run = state_of(told.scheduler, 3.0).run
    assert (run.trainer_waiting, run.takes_parts) == (True, True)
    assert run.round == Launch(1)
