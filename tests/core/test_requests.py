"""Requests: a move takes along whatever depends on it."""

from __future__ import annotations

from rollout_sched.core.model.actions import Interrupt
from rollout_sched.core.model.events import RequestFinished, RequestSubmitted
from rollout_sched.core.model.model import RequestState
from tests.core.told import LIMIT, PROMPT, Told, thrown


def told() -> Told:
    """d1 runs, d2 waits."""
    told = Told(slots=1)
    told(RequestSubmitted("d1", "", PROMPT, LIMIT), RequestSubmitted("d2", "", PROMPT, LIMIT))
    return told


def test_who_is_parked_waits_no_more_and_who_waits_is_not_parked() -> None:
    requests, request = told().scheduler.work.requests, None
    request = requests["d2"]
    requests.park(request)
    assert request.state is RequestState.PARKED
    assert (len(requests.waiting), len(requests.replay_buffer)) == (0, 1)
    request.rests_until = 5.0
    requests.wait(request)
    assert (len(requests.waiting), len(requests.replay_buffer)) == (1, 0)
    assert request.rests_until == 0.0


def test_an_end_takes_it_out_of_every_book() -> None:
    here = told()
    requests, out = here.scheduler.work.requests, here.scheduler._out
    requests.end(requests["d2"], "withdrawn")
    requests.end(requests["d1"], "withdrawn")
    assert out == [
        thrown("d2", 0, "withdrawn", ends=True),
        Interrupt("d1", 1, "i0"),
        thrown("d1", 0, "withdrawn", ends=True),
    ]
    assert len(requests) == len(requests.waiting) == 0
    assert here.scheduler.books.fleet.attempts[1].abandoned == "withdrawn"


def test_starting_over_forgets_all_that_was_made() -> None:
    here = Told(interruption={"use": "partial", "segment_tokens": 7})
    here.submit("a")
    scheduler = here.scheduler
    group = scheduler.books.groups["a"]
    scheduler.work.outcomes.launch(group, 1.0)
    (request,) = group.requests
    request.response_tokens, request.context_tokens = 7, PROMPT + 7
    scheduler.work.requests.start_over(request, "stale")
    assert (request.response_tokens, request.context_tokens, request.segments) == (0, PROMPT, ())
    assert request.state is RequestState.PARKED
    assert scheduler._out == [thrown("a/0", 7, "stale")]


def test_room_is_what_the_largest_instance_leaves_beside_the_context() -> None:
    here = told()
    request, requests = here.request("d2"), here.scheduler.work.requests
    assert requests.room_for(request) == LIMIT
    request.context_tokens = here.scheduler.books.fleet.kv.most - 3
    assert requests.room_for(request) == 3
    request.context_tokens += 10
    assert requests.room_for(request) == 0


def test_what_one_teaches_the_others_expect() -> None:
    here = Told(slots=1, prediction="group_history")
    here(RequestSubmitted("d1", "p", PROMPT, LIMIT), RequestSubmitted("d2", "p", PROMPT, LIMIT))
    here(RequestSubmitted("d3", "p", PROMPT, LIMIT))
    assert here.request("d3").expected_tokens == LIMIT
    here(RequestFinished("d1", 1, 7))
    assert here.request("d3").expected_tokens == 7
