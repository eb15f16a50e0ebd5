"""What is known of a running instance, and what follows from it."""

from __future__ import annotations

from rollout_sched.policies.load_estimate import LoadEstimate
from tests.policies.running import Running

KV = 10**6  # tokens of each instance


def test_a_stream_says_exactly() -> None:
    fleet = Running(1)
    one, two = fleet.run(0, 500, 900)
    fleet.poll(0, 0.5)
    load = LoadEstimate(fleet[0])
    assert (load.context(one), load.context(two)) == (600, 1000)


def test_a_poll_says_on_average() -> None:
    fleet = Running(1)
    one, _ = fleet.run(0, 0, 0)
    assert LoadEstimate(fleet[0]).tokens == 200
    fleet.poll(0, 6000 / KV)
    load = LoadEstimate(fleet[0])
    assert (load.tokens, load.context(one)) == (6000, 3000)


def test_who_waits_for_kv_will_need_as_much() -> None:
    fleet = Running(1)
    fleet.run(0, 0, 0, 0)
    fleet.poll(0, 6000 / KV, running=2, waiting=1)
    assert LoadEstimate(fleet[0]).tokens == 9000


def test_an_idle_instance_that_was_polled_before_it_got_work() -> None:
    fleet = Running(1)
    fleet.poll(0, 0.0)
    fleet.run(0, 0)
    assert LoadEstimate(fleet[0]).tokens == 100


class TestTokensLeft:
    def left(self, made: int, estimate: int | None = None, most: int = 50_000) -> float:
        fleet = Running(1)
        (attempt,) = fleet.run(0, made)
        attempt.request.siblings.estimate = estimate
        attempt.request.siblings.max_tokens = most
        return LoadEstimate(fleet[0]).tokens_left(attempt)

    def test_as_many_again(self) -> None:
        assert self.left(700) == 700

    def test_as_siblings_say(self) -> None:
        assert self.left(700, 1000) == 300

    def test_as_many_again_once_siblings_were_wrong(self) -> None:
        assert self.left(1200, 1000) == 1200

    def test_never_more_than_it_may(self) -> None:
        assert self.left(700, most=1000) == 300


def test_room_is_kv_and_a_slot() -> None:
    fleet = Running(1, slots=3)
    fleet.run(0, 7900)
    fleet[0].kv_tokens = 10_000
    load = LoadEstimate(fleet[0])
    assert load.has_room(1000, 0.9)
    assert not load.has_room(1001, 0.9)
    load.add(100)
    load.add(100)
    assert not load.has_room(100, 1.0)
    load.take(100)
    assert load.has_room(100, 1.0)
    assert (load.requests, load.tokens) == (2, 8100)
