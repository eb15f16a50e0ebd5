"""Requests: a move takes along whatever depends on it."""

from __future__ import annotations

from rollout_sched.core.model.events import RequestFinished, RequestSubmitted
from tests.core.told import LIMIT, PROMPT, Told


def told() -> Told:
    """d1 runs, d2 waits."""
    told = Told(slots=1)
    told(RequestSubmitted("d1", "", PROMPT, LIMIT), RequestSubmitted("d2", "", PROMPT, LIMIT))
    return told


def test_room_is_the_largest_cache_less_the_context() -> None:
    here = told()
    request, requests = here.request("d2"), here.scheduler.parts.requests
    assert requests.room_for(request) == LIMIT
    request.context_tokens = here.scheduler.state.fleet.contexts.most - 3
    assert requests.room_for(request) == 3
    request.context_tokens += 10
    assert requests.room_for(request) == 0


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
