"""What is expected of requests: whoever waits stands where it says, and is told when it changes."""

from __future__ import annotations

from rollout_sched.core.model.events import RequestFinished, RequestSubmitted
from tests.core.told import LIMIT, PROMPT, Told


def direct(name: str, prompt: str, priority: int = 0) -> RequestSubmitted:
    return RequestSubmitted(name, prompt, PROMPT, LIMIT, "", priority)


def waiting(told: Told) -> list[str]:
    return [request.id for request in told.scheduler.work.requests.waiting]


def test_what_one_teaches_the_others_expect_and_their_order_follows() -> None:
    told = Told(slots=2, prediction="group_history", ordering="longest_first")
    told(direct("p1", "p"), direct("q1", "q"), direct("p2", "p"), direct("q2", "q"))
    assert waiting(told) == ["p2", "q2"]
    told.scheduler.books.fleet.instances["i0"].slots = 0  # nobody follows those that finish
    told(RequestFinished("p1", 1, 7), RequestFinished("q1", 2, 70))
    assert [told.request(name).expected_tokens for name in ("p2", "q2")] == [7, 70]
    assert waiting(told) == ["q2", "p2"]


def test_what_was_expected_is_not_asked_again_where_nothing_was_learnt() -> None:
    told = Told(slots=1, prediction="group_history")
    told(direct("p1", "p"), direct("p2", "p"), direct("p3", "p"))
    told(RequestFinished("p1", 1, 7))
    siblings = told.request("p3").siblings
    told.request("p3").expected_tokens = 5
    told.scheduler.work.requests.expectations.learn(siblings)
    assert told.request("p3").expected_tokens == 5


def test_what_is_in_flight_counts_as_much_as_is_expected_of_it() -> None:
    told = Told(prediction="group_history", routing="least_tokens")
    told(direct("p1", "p"), direct("p2", "p"))
    assert told.instance("i0").tokens == 2 * (PROMPT + LIMIT)
    told(RequestFinished("p1", 1, 7))
    assert told.instance("i0").tokens == PROMPT + 7


def test_from_the_first_priority_on_all_stand_by_it() -> None:
    told = Told(slots=1)
    told(direct("a", "a"), direct("b", "b"), direct("c", "c", 1), direct("d", "d", -1))
    assert waiting(told) == ["d", "b", "c"]


def test_who_has_its_kv_somewhere_goes_first_where_sessions_are_bounded() -> None:
    told = Told(slots=1, admission={"use": "aimd_concurrency", "longest": LIMIT})
    told(direct("a", "a"), direct("b", "b"), direct("c", "c"))
    request, requests = told.request("c"), told.scheduler.work.requests
    told.scheduler.books.fleet.keep(request, told.instance("i0"))
    requests.expectations.rerank(request)
    assert waiting(told) == ["c", "b"]
    requests.leave_home(request)
    assert waiting(told) == ["b", "c"]
