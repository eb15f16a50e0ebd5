"""A scheduler as facts: what is in flight stands there as if its instance were lost."""

from __future__ import annotations

from rollout_sched.core.model.events import (
    BatchRequested,
    GroupSubmitted,
    InstanceLost,
    RequestFailed,
    RequestFinished,
    RequestSubmitted,
    TokensArrived,
    ToolReturned,
    TurnFinished,
    WeightsPublished,
)
from rollout_sched.core.model.records import GroupFacts, Launch, PromptFacts, RequestFacts, Segment
from rollout_sched.core.restart.facts import state_of
from tests.core.told import LIMIT, PROMPT, Told

PARTIAL = {"use": "partial", "at_update": "in_place"}
HISTORY = {"use": "prompt_history", "quantile": 0.5}


def group_of(told: Told, name: str = "a") -> GroupFacts:
    return next(facts for facts in state_of(told.scheduler, 0.0).groups if facts.group == name)


def request_of(told: Told) -> RequestFacts:
    (request,) = group_of(told).requests
    return request


def test_a_fresh_group_is_what_was_asked_for() -> None:
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


def test_what_was_streamed_of_a_running_request_is_kept_as_by_a_loss() -> None:
    told = Told(interruption=PARTIAL)
    told.submit("a")
    told(BatchRequested(), TokensArrived("a/0", 1, 7))
    before = state_of(told.scheduler, 0.0).groups
    assert request_of(told) == RequestFacts(
        0, 2, "waiting", (Segment(0, 7, "i0"),), 0, 17, salt=0, last_attempt=1, last_instance="i0"
    )
    told(InstanceLost("i0"))
    assert state_of(told.scheduler, 0.0).groups == before


def test_a_tool_at_work_and_what_it_has_said() -> None:
    told = Told()
    told.submit("a")
    told(BatchRequested(), TurnFinished("a/0", 1, 5))
    assert (request_of(told).state, request_of(told).turn) == ("acting", 1)
    told(ToolReturned("a/0", 1, 20))
    request = request_of(told)
    assert (request.state, request.observed_tokens, request.settled_tokens) == ("waiting", 20, 5)
    assert request.last_attempt == 2


def test_who_rests_waits_and_who_has_spent_its_budget_is_parked() -> None:
    told = Told(instances=2)
    told.submit("a")
    told(BatchRequested())
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


def test_a_direct_request_is_no_fact() -> None:
    told = Told()
    told(RequestSubmitted("d", "", PROMPT, LIMIT))
    assert state_of(told.scheduler, 0.0).groups == ()
