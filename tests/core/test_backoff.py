"""Backoff: rests double, nobody is forgotten, nobody is woken who was let go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.core.model.actions import Action, Wake
from rollout_sched.core.model.model import Instance
from rollout_sched.core.work.attempts import Backoff
from tests.core.told import make_request


def instance(name: str = "i0") -> Instance:
    return Instance(name, 0, 8, 100, 0)


def test_a_rest_is_doubled_for_each_in_a_row_up_to_64_times() -> None:
    backoff = Backoff(0.5, [])
    who = instance()
    rests = []
    for before in range(9):
        backoff.rest(who, before, 10.0)
        rests.append(who.rests_until - 10.0)
    assert rests == [0.5, 1, 2, 4, 8, 16, 32, 32, 32]


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


def test_an_earlier_end_is_asked_for() -> None:
    out: list[Action] = []
    backoff = Backoff(1.0, out)
    backoff.rest(instance("i0"), 3, 0.0)
    backoff.rest(instance("i1"), 0, 2.0)
    assert out == [Wake(8.0), Wake(3.0)]


def test_who_was_let_go_is_not_woken() -> None:
    backoff = Backoff(1.0, [])
    who = instance()
    backoff.rest(who, 0, 0.0)
    who.rests_until = 0.0
    assert backoff.wake(5.0) == []


def test_a_longer_rest_replaces_the_one_before() -> None:
    backoff = Backoff(1.0, [])
    who = instance()
    backoff.rest(who, 0, 0.0)
    backoff.rest(who, 2, 0.0)
    assert backoff.wake(1.0) == []
    assert backoff.wake(4.0) == [who]


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 50)), min_size=1, max_size=30))
def test_whoever_rests_is_woken_at_the_wakes_alone(rests: list[tuple[int, float]]) -> None:
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
