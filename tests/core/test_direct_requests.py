"""Direct requests: a client waits for each; batches, rounds and staleness do not touch them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from rollout_sched.config import load_policy, shipped
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Discard, Dispatch, Interrupt
from rollout_sched.core.model.events import (
    BatchRequested,
    Event,
    InstanceJoined,
    InstanceLost,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    RequestWithdrawn,
    SessionEnded,
    TokensArrived,
)
from rollout_sched.core.model.model import Segment
from tests.core.told import BIG, LIMIT, PROMPT, Told, sent, thrown


def ask(name: str = "d1", group: str = "g", session: str = "") -> RequestSubmitted:
    return RequestSubmitted(name, group, PROMPT, LIMIT, session)


def test_answered_without_a_trainer() -> None:
    told = Told(prompts_per_step=4)
    assert told(ask()) == [sent("d1", 1)]
    (answer,) = told(RequestFinished("d1", 1, 7))
    assert answer.sample.request == "d1"
    assert answer.sample.segments == (Segment(0, 7, "i0"),)
    assert not told.scheduler.parts.requests
    assert not told.scheduler.state.siblings


def test_request_continues_from_the_tokens_of_an_earlier_scheduler() -> None:
    told = Told(prompts_per_step=4)
    made = (Segment(2, 3, "i7"), Segment(3, 1, "i8"))
    (dispatch,) = told(RequestSubmitted("d1", "g", PROMPT, LIMIT, prior_segments=made))
    assert dispatch == Dispatch("d1", 1, "i0", PROMPT + 4, LIMIT - 4, 0, response_tokens=4)
    (answer,) = told(RequestFinished("d1", 1, 2))
    assert answer.sample.segments == (*made, Segment(0, 2, "i0"))
    assert answer.sample.response_tokens == 6
    (answer,) = told(RequestSubmitted("d2", "g", PROMPT, 4, prior_segments=made))
    assert answer.sample.finish == "length"
    (answer,) = told(RequestSubmitted("d3", "g", PROMPT, LIMIT, prior_segments=made, ends=True))
    assert (answer.sample.finish, answer.sample.segments) == ("stop", made)
    assert not told.scheduler.parts.requests


@pytest.mark.parametrize("made", [(0,), (3, -1), (LIMIT, 1)])
def test_impossible_prior_segments_are_refused(made: tuple[int, ...]) -> None:
    told = Told(prompts_per_step=4)
    segments = tuple(Segment(0, tokens, "i0") for tokens in made)
    with pytest.raises(CallerError, match="are not a response of at most"):
        told(RequestSubmitted("d1", "g", PROMPT, LIMIT, prior_segments=segments))
    assert not told.scheduler.parts.requests


def test_a_batch_leaves_them_alone() -> None:
    told = Told(prompts_per_step=1)
    told.submit("a")
    told(ask(), BatchRequested())
    delivered = told(RequestFinished("a/0", 2, 5))
    assert "d1" in told.scheduler.parts.requests
    assert not any(isinstance(action, Interrupt | Discard) for action in delivered)


def test_hanging_up_frees_the_slot() -> None:
    told = Told(slots=1)
    told(ask("d1"), ask("d2"))
    assert told(RequestWithdrawn("d1")) == [
        Interrupt("d1", 1, "i0"),
        thrown("d1", 0, "withdrawn", ends=True),
    ]
    actions = told(RequestInterrupted("d1", 1, 3))
    assert actions == [thrown("d1", 3, "withdrawn", attempt=1), sent("d2", 2)]


@pytest.mark.parametrize("resumable", [True, False])
def test_an_aborted_request_is_answered_with_what_it_has(resumable: bool) -> None:
    """Running, waiting, and when its attempt fails while it stops; its siblings learn nothing."""
    told = Told(slots=1, prediction="group_history")
    first = msgspec.structs.replace(ask("d1"), resumable=resumable)
    told(first, ask("d2"), ask("d3"))
    assert told(RequestAborted("d1")) == [Interrupt("d1", 1, "i0")]
    assert told(RequestAborted("d1")) == []
    answer, dispatch = told(RequestInterrupted("d1", 1, 3))
    assert (answer.sample.finish, answer.sample.segments) == ("abort", (Segment(0, 3, "i0"),))
    assert dispatch == sent("d2", 2)
    (answer,) = told(RequestAborted("d3"))
    assert (answer.sample.finish, answer.sample.segments) == ("abort", ())
    assert told.request("d2").expected_tokens == LIMIT
    told(TokensArrived("d2", 2, 5), RequestAborted("d2"))
    (answer,) = told(RequestFailed("d2", 2, "reset by peer"))
    assert (answer.sample.finish, answer.sample.response_tokens) == ("abort", 5)
    assert told.anomalies == {}


def test_what_ends_by_itself_is_not_aborted() -> None:
    told = Told()
    told(ask("d1"), RequestAborted("d1"))
    (answer,) = told(RequestFinished("d1", 1, 7))
    assert answer.sample.finish == "stop"
    told(RequestAborted("d1"))
    assert told.anomalies == {"unknown_request": 1}


def test_hanging_up_twice_is_counted() -> None:
    told = Told()
    told(ask("d1"), RequestWithdrawn("d1"), RequestWithdrawn("d1"))
    assert told.anomalies == {"unknown_request": 1}


def test_impossible_request_fails_alone() -> None:
    told = Told()
    told(ask("d1"), ask("d2"))
    (gone,) = told(RequestFailed("d1", 1, "400", blame="request"))
    assert gone == thrown("d1", 0, "failed", ends=True)
    assert [request.id for request in told.scheduler.parts.requests] == ["d2"]


def test_siblings_teach_each_other() -> None:
    told = Told(prediction="group_history", routing="least_tokens")
    told(ask("d1"), ask("d2"))
    assert told.request("d2").expected_tokens == LIMIT
    told(RequestFinished("d1", 1, 7))
    assert told.request("d2").expected_tokens == 7


def test_a_session_goes_home() -> None:
    told = Told(instances=3, routing={"use": "session_affinity", "margin": 1})
    told(ask("d1", "g", "talk"), ask("d2"), RequestFinished("d1", 1, 5))
    (dispatch,) = told(ask("d3", "h", "talk"))
    assert isinstance(dispatch, Dispatch)
    assert dispatch.instance == "i0"
    told(SessionEnded("talk"), SessionEnded("talk"))
    assert told.anomalies == {"unknown_session": 1}


TURNS = 5
CLIENTS = 12


def converse(told: Told, *, sessions: bool) -> list[tuple[str, str]]:
    """So many clients with so many turns each: what was sent where. Answers come, and clients ask
    on, in any order. A turn's context holds the one before it."""
    rng = random.Random(0)
    where: list[tuple[str, str]] = []
    turns: Counter[int] = Counter()
    thinking = list(range(CLIENTS))
    running: dict[str, Dispatch] = {}
    while running or thinking:
        place = rng.randrange(len(running) + len(thinking))
        event: Event
        if place < len(thinking):
            client = thinking.pop(place)
            turns[client] += 1
            name, session = f"c{client}.{turns[client]}", f"s{client}" if sessions else ""
            event = RequestSubmitted(name, name, PROMPT + 40 * turns[client], LIMIT, session)
        else:
            name = sorted(running)[place - len(thinking)]
            event = RequestFinished(name, running.pop(name).attempt, 30)
            client = int(name[1:].split(".")[0])
            if turns[client] < TURNS:
                thinking.append(client)
        for action in told(event):
            if isinstance(action, Dispatch):
                running[action.request] = action
                where.append((action.request, action.instance))
    return where


def moved(where: list[tuple[str, str]]) -> int:
    """Clients who were not always sent to the same instance."""
    places: dict[str, set[str]] = {}
    for name, instance in where:
        places.setdefault(name.split(".")[0], set()).add(instance)
    return sum(len(some) > 1 for some in places.values())


@pytest.mark.parametrize("preset", shipped("policies/presets"))
def test_a_session_stays_where_its_kv_is_under_every_preset(preset: str) -> None:
    told = Told(instances=0)
    told.scheduler = load_policy(preset).scheduler(prompts_per_step=4)
    told(*(InstanceJoined(f"i{number}", 8, 10**6) for number in range(3)))
    where = converse(told, sessions=True)
    assert len(where) == TURNS * CLIENTS
    assert moved(where) <= 3


def test_without_affinity_sessions_move() -> None:
    told = Told(instances=3, affinity="none")
    assert moved(converse(told, sessions=True)) >= CLIENTS - 2
    assert told.scheduler.view.session_moves > CLIENTS
    assert told.scheduler.view.sessions == CLIENTS
    assert not told.scheduler.view.keeps_sessions


@pytest.mark.parametrize("routing", ["round_robin", "random", "least_tokens"])
def test_request_without_a_session_ignores_affinity(routing: str) -> None:
    runs = [
        converse(Told(instances=3, routing=routing, affinity=affinity), sessions=False)
        for affinity in ("by_cost", "none")
    ]
    assert runs[0] == runs[1]
    assert moved(runs[0]) >= CLIENTS - 2


def test_a_home_that_is_lost_is_left_and_that_counts() -> None:
    told = Told(instances=2)
    told(ask("d1", "g", "talk"), RequestFinished("d1", 1, 5), InstanceLost("i0", "gone"))
    (dispatch,) = told(ask("d2", "h", "talk"))
    assert isinstance(dispatch, Dispatch)
    assert (dispatch.instance, told.scheduler.view.session_moves) == ("i1", 1)


@pytest.mark.parametrize(
    ("roles", "first"),
    [
        ({}, ["urgent", "g/0", "g/1", "early", "late"]),
        ({"ordering": "shortest_first"}, ["urgent", "g/0", "g/1", "early", "late"]),
        ({"admission": "session_cap"}, ["urgent", "g/0", "g/1", "early", "late"]),
    ],
)
def test_waiting_requests_go_by_least_priority(roles: Any, first: list[str]) -> None:
    told = Told(slots=1, **roles)
    told(ask("running"))
    told.submit("g", samples=2)
    told(BatchRequested())
    told(ask("early"))
    told(RequestSubmitted("late", "h", PROMPT, LIMIT, priority=1))
    told(RequestSubmitted("urgent", "i", PROMPT, LIMIT, priority=-1))
    order = []
    running = "running", 1
    while running:
        actions = told(RequestFinished(*running, 5))
        sent = [action for action in actions if isinstance(action, Dispatch)]
        order += [action.request for action in sent]
        running = (sent[0].request, sent[0].attempt) if sent else ()
    assert order == first


def test_request_with_kv_overtakes_requests_without() -> None:
    told = Told(slots=1, admission={"use": "aimd_concurrency", "longest": BIG})
    told(ask("d1", session="talk"), ask("d2"), ask("d3"))
    told(RequestFinished("d1", 1, 5))
    assert told.running == ["d2"]
    assert told(ask("d4", session="talk")) == []
    (_, dispatch) = told(RequestFinished("d2", 2, 5))
    assert isinstance(dispatch, Dispatch)
    assert dispatch.request == "d4"


def test_a_segment_budget_goes_on_at_once() -> None:
    told = Told(interruption={"use": "partial", "segment_tokens": 10})
    told(ask())
    (again,) = told(RequestFinished("d1", 1, 10, reason="length"))
    assert again == Dispatch("d1", 2, "i0", 20, 10, 0, 10, 20, 0)


@pytest.mark.parametrize(
    "event",
    [
        RequestSubmitted("d", "g", 0, 1),
        RequestSubmitted("d", "g", 1, 0),
        RequestSubmitted("d", "g", BIG, 1),
        RequestSubmitted("known", "g", 1, 1),
    ],
)
def test_oversized_request_is_refused(event: RequestSubmitted) -> None:
    told = Told()
    told(ask("known"))
    with pytest.raises(CallerError):
        told(event)
    assert [request.id for request in told.scheduler.parts.requests] == ["known"]
