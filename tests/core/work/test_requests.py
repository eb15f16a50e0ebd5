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


def test_request_is_either_parked_or_waiting() -> None:
    requests, request = told().scheduler.parts.requests, None
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
    requests, out = here.scheduler.parts.requests, here.scheduler.state.orders
    requests.end(requests["d2"], "withdrawn")
    requests.end(requests["d1"], "withdrawn")
    assert out == [
        thrown("d2", 0, "withdrawn", ends=True),
        Interrupt("d1", 1, "i0"),
        thrown("d1", 0, "withdrawn", ends=True),
    ]
    assert len(requests) == len(requests.waiting) == 0
    assert here.scheduler.state.fleet.attempts[1].abandoned == "withdrawn"


def test_starting_over_forgets_all_that_was_made() -> None:
    here = Told(interruption={"use": "partial", "segment_tokens": 7})
    here.submit("a")
    scheduler = here.scheduler
    group = scheduler.state.groups["a"]
    scheduler.parts.group_outcomes.launch(group, 1.0)
    (request,) = group.requests
    request.response_tokens, request.context_tokens = 7, PROMPT + 7
    scheduler.parts.requests.start_over(request, "stale")
    assert (request.response_tokens, request.context_tokens, request.segments) == (0, PROMPT, ())
    assert request.state is RequestState.PARKED
    assert scheduler.state.orders == [thrown("a/0", 7, "stale")]


def test_room_is_what_the_largest_instance_leaves_beside_the_context() -> None:
    here = told()
    request, requests = here.request("d2"), here.scheduler.parts.requests
    assert requests.room_for(request) == LIMIT
    request.context_tokens = here.scheduler.state.fleet.kv.most - 3
    assert requests.room_for(request) == 3
    request.context_tokens += 10
    assert requests.room_for(request) == 0


def test_finished_request_changes_expectations() -> None:
    here = Told(slots=1, prediction="group_history")
    here(RequestSubmitted("d1", "p", PROMPT, LIMIT), RequestSubmitted("d2", "p", PROMPT, LIMIT))
    here(RequestSubmitted("d3", "p", PROMPT, LIMIT))
    assert here.request("d3").expected_tokens == LIMIT
    here(RequestFinished("d1", 1, 7))
    assert here.request("d3").expected_tokens == 7


def direct(name: str, prompt: str, priority: int = 0) -> RequestSubmitted:
    return RequestSubmitted(name, prompt, PROMPT, LIMIT, "", priority)


def waiting(told: Told) -> list[str]:
    return [request.id for request in told.scheduler.parts.requests.waiting]


def test_finished_request_changes_the_order() -> None:
    told = Told(slots=2, prediction="group_history", ordering="longest_first")
    told(direct("p1", "p"), direct("q1", "q"), direct("p2", "p"), direct("q2", "q"))
    assert waiting(told) == ["p2", "q2"]
    told.scheduler.state.fleet.instances["i0"].slots = 0  # nobody follows those that finish
    told(RequestFinished("p1", 1, 7), RequestFinished("q1", 2, 70))
    assert [told.request(name).expected_tokens for name in ("p2", "q2")] == [7, 70]
    assert waiting(told) == ["q2", "p2"]


def test_expectation_is_kept_without_new_lengths() -> None:
    told = Told(slots=1, prediction="group_history")
    told(direct("p1", "p"), direct("p2", "p"), direct("p3", "p"))
    told(RequestFinished("p1", 1, 7))
    siblings = told.request("p3").siblings
    told.request("p3").expected_tokens = 5
    told.scheduler.parts.requests.expectations.learn(siblings)
    assert told.request("p3").expected_tokens == 5


def test_running_request_counts_its_expected_tokens() -> None:
    told = Told(prediction="group_history", routing="least_tokens")
    told(direct("p1", "p"), direct("p2", "p"))
    assert told.instance("i0").tokens == 2 * (PROMPT + LIMIT)
    told(RequestFinished("p1", 1, 7))
    assert told.instance("i0").tokens == PROMPT + 7


def test_from_the_first_priority_on_all_stand_by_it() -> None:
    told = Told(slots=1)
    told(direct("a", "a"), direct("b", "b"), direct("c", "c", 1), direct("d", "d", -1))
    assert waiting(told) == ["d", "b", "c"]


def test_request_with_kv_goes_first_under_bounded_sessions() -> None:
    told = Told(slots=1, admission={"use": "aimd_concurrency", "longest": LIMIT})
    told(direct("a", "a"), direct("b", "b"), direct("c", "c"))
    request, requests = told.request("c"), told.scheduler.parts.requests
    told.scheduler.state.fleet.retain_kv(request, told.instance("i0"))
    requests.expectations.rerank(request)
    assert waiting(told) == ["c", "b"]
    requests.leave_home(request)
    assert waiting(told) == ["b", "c"]
