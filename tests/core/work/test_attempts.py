"""The ledger: what an answer says is believed as far as it can be true."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.core.handlers import MAX_EXTERNAL_ABORTS
from rollout_sched.core.model.actions import Action, Answer, Dispatch, Wake
from rollout_sched.core.model.events import (
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    RequestWithdrawn,
    Woke,
)
from rollout_sched.core.model.model import Instance
from rollout_sched.core.work.attempts import Backoff
from tests.core.told import LIMIT, PROMPT, Told, begun, make_request, thrown


def told() -> Told:
    told = Told(version=5)
    told(RequestSubmitted("d", "", PROMPT, LIMIT))
    return told


def ask(name: str, group: str = "") -> RequestSubmitted:
    return RequestSubmitted(name, group or name, PROMPT, LIMIT)


def dispatched(actions: list[object]) -> list[tuple[str, int, str]]:
    return [(a.request, a.attempt, a.instance) for a in actions if isinstance(a, Dispatch)]


def until_given_up(told: Told, name: str) -> tuple[int, list[str]]:
    """Fail every attempt of a request; how many there were, and where."""
    where: list[str] = []
    while name in told.scheduler.parts.requests:
        attempt = told.request(name).attempt
        if attempt is None:
            told.seconds += 0.5
            told(Woke())
            continue
        where.append(attempt.instance.id)
        told(RequestFailed(name, attempt.id, "status 500"))
    return len(where), where


def test_request_failing_twice_waits_before_a_retry() -> None:
    told = Told(instances=3)
    told(ask("d"), RequestFailed("d", 1, "500"))
    assert told(RequestFailed("d", 2, "500")) == [Wake(2.0)]
    told.seconds = 2.0
    assert dispatched(told(Woke())) == [("d", 3, "i2")]
    assert told(RequestFailed("d", 3, "500")) == [Wake(6.0)]


def test_on_a_single_instance_it_waits_from_the_first_failure_on() -> None:
    told = Told()
    told(ask("d"))
    assert told(RequestFailed("d", 1, "500")) == [Wake(1.0)]
    told.seconds = 1.0
    assert dispatched(told(Woke())) == [("d", 2, "i0")]


def test_poison_never_puts_an_instance_to_rest() -> None:
    told = Told(instances=4)
    for number in range(20):
        told(ask(f"poison{number}"))
        tries, where = until_given_up(told, f"poison{number}")
        assert tries == told.scheduler.parts.outcomes.max_failures
        assert len(set(where)) == 4, "it was tried everywhere before anywhere twice"
        assert not any(told.instance(f"i{i}").rests_until for i in range(4))
        assert not any(told.instance(f"i{i}").suspects for i in range(4))


def test_poison_that_comes_all_at_once_delays_nobody() -> None:
    told = Told(instances=2, slots=64, routing="least_requests")
    for number in range(40):
        told(ask(f"poison{number}"))
    for number in range(40):
        attempt = told.request(f"poison{number}").attempt
        told(RequestFailed(f"poison{number}", attempt.id, "500"))
    assert len(dispatched(told(ask("innocent")))) == 1


def test_rested_request_waits_behind_newer_ones() -> None:
    told = Told(slots=1)
    told(ask("poison"), RequestFailed("poison", 1, "500"))
    told(ask("innocent"), ask("another"))
    told.seconds = 1.0
    assert dispatched(told(Woke())) == []
    assert dispatched(told(RequestFinished("innocent", 2, 3))) == [("another", 3, "i0")]
    assert dispatched(told(ask("late"), RequestFinished("another", 3, 3))) == [("poison", 4, "i0")]


def test_a_sample_that_has_failed_keeps_its_place() -> None:
    """The order among its own is the trainer's, and a fresh scheduler has to find it again."""
    told = begun("a", "b", samples=2, slots=1)
    told(RequestFailed("a/0", 1, "500"))
    told.seconds = 1.0
    told(Woke())
    assert dispatched(told(RequestFinished("a/1", 2, 3))) == [("a/0", 3, "i0")]


def test_request_stopped_externally_keeps_its_place() -> None:
    told = Told(slots=1)
    told(ask("stopped"), RequestInterrupted("stopped", 1, 0))
    told(ask("running"), ask("waiting"))
    told.seconds = 1.0
    told(Woke())
    assert dispatched(told(RequestFinished("running", 2, 3))) == [("stopped", 3, "i0")]


def test_a_paused_instance_is_not_to_blame() -> None:
    told = Told(slots=1)
    told(ask("a"))
    for attempt in range(1, 20):
        told(RequestFailed("a", attempt, blame="nobody"))
        told.seconds += 1.0
        assert dispatched(told(Woke())) == [("a", attempt + 1, "i0")]
    assert (told.request("a").failures, told.instance("i0").faults) == (0, 0)


def test_an_instance_that_alone_fails_comes_to_rest() -> None:
    told = Told(instances=2, slots=64, routing="least_requests")
    wakes = []
    for number in range(3):
        (first,) = dispatched(told(ask(f"d{number}")))
        assert first[2] == "i0", "it fails at once, so it is the emptiest"
        told(RequestFailed(f"d{number}", first[1], "500"))
    for number in range(3):
        attempt = told.request(f"d{number}").attempt
        wakes += [
            action
            for action in told(RequestFinished(f"d{number}", attempt.id, 5))
            if isinstance(action, Wake)
        ]
    assert wakes == [Wake(1.0)]
    assert told.instance("i0").rests_until == 1.0
    assert told.instance("i1").rests_until == 0.0
    assert dispatched(told(ask("next")))[0][2] == "i1"
    told.seconds = 1.0
    told(Woke())
    assert told.instance("i0").rests_until == 0.0


def test_an_instance_that_fails_now_and_then_goes_on() -> None:
    told = Told(instances=2, slots=4, routing="round_robin")
    rested = 0.0
    for number in range(200):
        (first,) = dispatched(told(ask(f"d{number}")))
        if first[2] == "i0" and number % 20 == 0:
            (first,) = dispatched(told(RequestFailed(f"d{number}", first[1], "broken answer")))
        assert any(
            isinstance(action, Answer) for action in told(RequestFinished(*first[:2], tokens=3))
        )
        rested = max(rested, told.instance("i0").rests_until)
    assert rested == 0.0


def test_withdrawn_request_blames_no_instance() -> None:
    told = Told(instances=2)
    told(ask("d"), RequestFailed("d", 1, "500"))
    assert told.instance("i0").suspects == {"d"}
    assert told(RequestWithdrawn("d"))[-1] == thrown("d", 0, "withdrawn", ends=True)
    assert not told.instance("i0").suspects


def test_resting_request_may_be_withdrawn() -> None:
    told = Told()
    told(ask("d"), RequestFailed("d", 1, "500"))
    assert told(RequestWithdrawn("d")) == [thrown("d", 0, "withdrawn", ends=True)]
    told.seconds = 1.0
    assert told(Woke()) == []


def test_siblings_that_never_end_make_no_request_dearer() -> None:
    told = Told(slots=10_000, prediction="group_history")
    for number in range(500):
        told(ask(f"d{number}", "one group for all"))
    sizes = {len(request.siblings.requests) for request in told.scheduler.parts.requests}
    assert max(sizes) <= 64
    for number in range(500):
        told(RequestFinished(f"d{number}", number + 1, 5))
    assert len(told.scheduler.state.siblings) == 0


def test_an_abort_that_nobody_asked_for_is_not_answered_with_another_attempt_at_once() -> None:
    told = Told()
    told(ask("d"))
    assert told(RequestInterrupted("d", 1, 3)) == [Wake(1.0)]
    told.seconds = 1.0
    (dispatch,) = told(Woke())
    assert dispatch.response_tokens == 3


@pytest.mark.parametrize(
    ("resumable", "tokens"), [(msgspec.UNSET, 0), (False, 0), (False, 3), (False, LIMIT)]
)
def test_request_always_stopped_externally_fails_in_the_end(
    resumable: bool | msgspec.UnsetType, tokens: int
) -> None:
    told = Told()
    told(ask("d"))
    stops = 0
    while "d" in told.scheduler.parts.requests and stops < 2 * MAX_EXTERNAL_ABORTS:
        attempt = told.request("d").attempt
        told(RequestInterrupted("d", attempt.id, tokens, resumable=resumable))
        stops += 1
        told.seconds += 1.0
        told(Woke())
    assert stops == MAX_EXTERNAL_ABORTS + 1


def instance(name: str = "i0") -> Instance:
    return Instance(name, 0, 8, 100, 0)


def test_requests_and_instances_rest_alike() -> None:
    out: list[Action] = []
    backoff = Backoff(1.0, out)
    request, server = make_request(), instance()
    backoff.rest(request, 0, 0.0)
    backoff.rest(server, 1, 0.0)
    assert out == [Wake(1.0)], "the later one is asked for when the earlier has come"
    assert backoff.wake(0.5) == []
    assert backoff.wake(1.0) == [request]
    assert out == [Wake(1.0), Wake(1.0), Wake(2.0)]
    assert backoff.wake(2.0) == [server]
    assert len(out) == 3
    assert request.rests_until == server.rests_until == 0.0


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 50)), min_size=1, max_size=30))
def test_resting_instances_wake_at_their_wakes_only(rests: list[tuple[int, float]]) -> None:
    wakes: list[Wake] = []
    backoff = Backoff(1.0, wakes)  # type: ignore[arg-type]
    everyone = []
    for number, (before, now) in enumerate(sorted(rests, key=lambda rest: rest[1])):
        who = instance(f"i{number}")
        everyone.append(who)
        backoff.rest(who, before, now)
    woken: list[object] = []
    while wakes:
        at = min(wake.at for wake in wakes)
        wakes[:] = [wake for wake in wakes if wake.at > at]
        woken += backoff.wake(at)
    assert sorted(map(id, woken)) == sorted(map(id, everyone))
