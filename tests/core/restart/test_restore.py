"""A fresh scheduler goes on where an earlier one has ended (`tests/laws/test_restarts.py`)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.events import (
    BatchRequested,
    Event,
    GroupSubmitted,
    InstanceJoined,
    RequestFinished,
    Restored,
    SubmissionsClosed,
    TokensArrived,
    ToolReturned,
    TurnFinished,
    WeightsPublished,
)
from rollout_sched.core.model.records import (
    GroupFacts,
    Launch,
    RequestFacts,
    RunFacts,
    RunState,
    Segment,
)
from rollout_sched.core.restart.facts import state_of
from tests.core.told import BIG, LIMIT, PROMPT, Told, resumed

PARTIAL = {"use": "partial", "at_update": "in_place"}
HISTORY = {"use": "prompt_history", "quantile": 0.5}
JOINED = InstanceJoined("i0", 8, BIG, 0)


def after(told: Told, *, seconds: float = 0.0, **roles: Any) -> Told:
    """The scheduler that follows this one."""
    state = state_of(told.scheduler, told.seconds)
    size = told.scheduler.state.progress.prompts_per_step
    following = Told(size, instances=0, **roles)
    following.seconds = told.seconds + seconds
    following(Restored(state))
    return following


def begun(*events: Event, groups: int = 1, **roles: Any) -> Told:
    told = Told(groups, **roles)
    told(BatchRequested(), *events)
    return told


def group(name: str, samples: int = 1) -> GroupSubmitted:
    return GroupSubmitted(name, samples, PROMPT, LIMIT)


def test_running_request_continues_under_a_new_attempt_number() -> None:
    told = begun(group("a"), TokensArrived("a/0", 1, 7), interruption=PARTIAL)
    following = after(told, interruption=PARTIAL)
    assert following(JOINED) == [resumed("a/0", 2, made=7)]
    assert following(RequestFinished("a/0", 1, 9)) == []
    assert following.anomalies == {"unknown_attempt": 1}


def test_finished_request_is_delivered_with_its_segments() -> None:
    told = begun(group("a", 2), RequestFinished("a/1", 2, 5))
    following = after(told)
    following(JOINED)
    (deliver,) = following(RequestFinished("a/0", 3, 6))
    assert [(s.request, s.segments) for s in deliver.samples] == [
        ("a/1", (Segment(0, 5, "i0"),)),
        ("a/0", (Segment(0, 6, "i0"),)),
    ]


def test_request_at_its_limit_is_finished() -> None:
    told = begun(group("a"), TokensArrived("a/0", 1, LIMIT))
    state = state_of(told.scheduler, 0.0)
    following = Told(1, instances=0)
    _, deliver = following(Restored(state))
    assert deliver.samples[0].finish == "length"


def test_a_tool_may_still_return() -> None:
    following = after(begun(group("a"), TurnFinished("a/0", 1, 5)))
    following(JOINED)
    (dispatch,) = following(ToolReturned("a/0", 1, 20))
    assert (dispatch.context_tokens, dispatch.turn) == (PROMPT + 25, 1)


def test_counters_go_on() -> None:
    run = RunFacts(
        now=3.0,
        version=4,
        closed=True,
        trainer_waiting=True,
        takes_parts=True,
        shares_gpus=True,
        delivered=7,
        batches=3,
        parts=1,
        in_batch=1,
        whole_at=3,
        round=Launch(2, 1, 1.5),
        serials=30,
        attempts=20,
        max_kv_tokens=BIG,
    )
    waits = GroupFacts("a", 1, 1, PROMPT, LIMIT, state="active", started=True)
    waits = msgspec.structs.replace(waits, requests=(RequestFacts(0, 2, "waiting"),))
    following = Told(3, instances=0)
    following.seconds = 3.0
    following(Restored(RunState(run, (waits,))))
    assert state_of(following.scheduler, 3.0) == RunState(
        run, (msgspec.structs.replace(waits, prompt="a"),)
    )
    with pytest.raises(CallerError, match="versions must increase"):
        following(WeightsPublished(4))
    with pytest.raises(CallerError, match="submissions were closed"):
        following(group("e"))


def test_learned_lengths_are_restored() -> None:
    told = Told(1, prediction=HISTORY)
    told(BatchRequested(), GroupSubmitted("a", 1, PROMPT, LIMIT, "p"))
    told(RequestFinished("a/0", 1, 42))
    told(GroupSubmitted("b", 1, PROMPT, LIMIT, "p"))
    told(GroupSubmitted("c", 1, PROMPT, LIMIT, history=(9,)))
    groups = {g.id: g for g in after(told, prediction=HISTORY).scheduler.state.groups}
    named, own = groups["b"].siblings.history, groups["c"].siblings.history
    assert (named.ascending, own.ascending) == ([42], [9])


def test_a_group_whose_tokens_are_lost_starts_anew() -> None:
    told = begun(group("a", 2), RequestFinished("a/1", 2, 5))
    state = state_of(told.scheduler, 0.0)
    groups = tuple([facts.as_submitted() for facts in state.groups])
    following = Told(1, instances=0)
    following(Restored(msgspec.structs.replace(state, groups=groups)))
    assert [dispatch.request for dispatch in following(JOINED)] == ["a/0", "a/1"]


def test_spent_budgets_and_deferred_groups_wait_for_their_round() -> None:
    parked = RequestFacts(0, 3, "parked", (Segment(0, 30, "i0"),), salt=0)
    one = GroupFacts("a", 1, 1, PROMPT, LIMIT, state="spent", started=True, oldest_version=0)
    two = GroupFacts("b", 2, 1, PROMPT, LIMIT, state="deferred")
    state = RunState(
        RunFacts(serials=4, attempts=2),
        (
            msgspec.structs.replace(one, requests=(parked,)),
            msgspec.structs.replace(two, requests=(RequestFacts(0, 4, "parked"),)),
        ),
    )
    following = Told(1, instances=0, interruption={"use": "partial", "segment_tokens": 30})
    following(Restored(state))
    assert len(following.scheduler.parts.requests.replay_buffer) + len(
        following.scheduler.parts.requests.waiting
    ) == len(following.scheduler.parts.requests)


def test_time_goes_on() -> None:
    state = RunState(RunFacts(now=10.0))
    told = Told(1, instances=0)
    with pytest.raises(CallerError, match="at the earlier time"):
        told(Restored(state))
    told.seconds = 10.0
    assert told(Restored(state)) == []


@pytest.mark.parametrize("event", [JOINED, group("a"), BatchRequested(), SubmissionsClosed()])
def test_only_a_scheduler_that_has_not_begun_is_restored(event: Event) -> None:
    told = Told(1, instances=0)
    told(event)
    with pytest.raises(CallerError, match="without events"):
        told(Restored(RunState()))


def test_a_batch_must_not_have_become_smaller() -> None:
    with pytest.raises(CallerError, match="prompts_per_step"):
        Told(2, instances=0)(Restored(RunState(RunFacts(in_batch=2))))
