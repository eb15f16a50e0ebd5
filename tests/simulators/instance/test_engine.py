"""Aborts, pauses and new versions between two steps, by hand-made examples."""

from __future__ import annotations

import math

import pytest

from rollout_sched.simulators.instance.engine import Inbox
from rollout_sched.simulators.instance.model import Ended, Paused
from tests.simulators.instance.by_hand import Make, follow, instance, request


def test_an_abort_returns_what_is_there_and_loses_the_step_under_way(make: Make) -> None:
    one = make()
    one.submit(request(1, new=50), 0.0)
    follow(one, until=3.5)
    one.abort(1, 3.5)
    assert follow(one) == [Ended(1, 3, ((1, 3),), "abort", 4.0)]
    assert one.gauges().generated_tokens == 3
    one.abort(1, 5.0)
    one.abort(99, 5.0)
    assert follow(one) == []


def test_an_abort_in_the_last_step_comes_first(make: Make) -> None:
    one = make()
    one.submit(request(1, new=3), 0.0)
    follow(one, until=2.5)
    one.abort(1, 2.5)
    assert follow(one) == [Ended(1, 2, ((1, 2),), "abort", 3.0)]


def test_aborted_text_is_found_again(make: Make) -> None:
    one = make()
    one.submit(request(1, context=10, new=50), 0.0)
    follow(one, until=30.0)
    one.abort(1, 30.0)
    one.submit(request(2, context=40, new=5, stream=1, known_tokens=39), 30.0)
    follow(one)
    # 39 tokens were computed, of which 9 whole blocks of 4 can be found.
    assert one.gauges().cached_tokens == 36
    assert one.gauges().prefill_tokens == 10 + 4
    assert one.gauges().reprefilled_tokens == 3


def test_pausing_keeps_everything_in_place(make: Make) -> None:
    one = make()
    one.submit(request(1, new=10), 0.0)
    follow(one, until=3.5)
    one.pause(3.5, "keep", clear_cache=False)
    assert follow(one, until=20.0) == [Paused("keep", 4.0)]
    assert one.next_at() == math.inf
    one.set_version(2, 20.0)
    one.resume(20.0)
    assert follow(one) == [Ended(1, 10, ((1, 4), (2, 6)), "stop", 26.0)]
    assert one.gauges().preemptions == 0


def test_keep_and_clear_computes_everything_again(make: Make) -> None:
    one = make()
    one.submit(request(1, context=10, new=10), 0.0)
    follow(one, until=4.0)
    one.pause(4.0, "keep", clear_cache=True)
    assert follow(one, until=5.0) == [Paused("keep", 4.0)]
    gauges = one.gauges()
    assert (gauges.running, gauges.waiting) == (0, 1)
    assert (gauges.kv_blocks_used, gauges.preemptions) == (0, 1)
    one.resume(5.0)
    assert [e.at for e in follow(one)] == [11.0]
    assert (one.gauges().prefill_tokens, one.gauges().reprefilled_tokens) == (10 + 14, 13)


def test_pause_abort_ends_all_in_order_of_arrival(make: Make) -> None:
    one = make(max_num_seqs=1)
    one.submit(request(1, new=10), 0.0)
    one.submit(request(2, new=10), 0.0)
    follow(one, until=2.5)
    one.pause(2.5, "abort", clear_cache=False)
    one.submit(request(3, new=1), 2.7)
    said = follow(one, until=9.0)
    assert said == [
        Ended(1, 3, ((1, 3),), "abort", 3.0),
        Ended(2, 0, (), "abort", 3.0),
        Paused("abort", 3.0),
    ]
    one.resume(9.0)
    assert [e.at for e in follow(one)] == [10.0]


def test_pause_wait_drains_those_running_only(make: Make) -> None:
    one = make(max_num_seqs=1)
    one.submit(request(1, new=5), 0.0)
    one.submit(request(2, new=5), 0.0)
    follow(one, until=1.5)
    one.pause(1.5, "wait", clear_cache=True)
    said = follow(one, until=9.0)
    assert said == [Ended(1, 5, ((1, 5),), "stop", 5.0), Paused("wait", 5.0)]
    assert one.gauges().waiting == 1
    one.resume(9.0)
    assert [e.at for e in follow(one)] == [14.0]


def test_an_idle_instance_pauses_at_once(make: Make) -> None:
    one = make()
    one.pause(3.0, "keep", clear_cache=True)
    assert one.next_at() == 3.0
    assert one.advance(3.0) == [Paused("keep", 3.0)]


def test_a_live_version_change_counts_from_the_next_step(make: Make) -> None:
    one = make()
    one.submit(request(1, new=6), 0.0)
    follow(one, until=2.5)
    one.set_version(2, 2.5)
    assert follow(one) == [Ended(1, 6, ((1, 3), (2, 3)), "stop", 6.0)]


def test_one_text_has_one_attempt_at_a_time() -> None:
    one = instance()
    one.submit(request(1), 0.0)
    with pytest.raises(ValueError, match="already on this instance"):
        one.submit(request(1), 0.0)
    with pytest.raises(ValueError, match="already has attempt 1"):
        one.submit(request(2, stream=1), 0.0)
    one.abort(1, 0.0)
    one.submit(request(2, stream=1), 0.0)
    assert [e.attempt for e in follow(one)] == [1, 2]  # type: ignore[union-attr]


def test_inputs_take_effect_in_order() -> None:
    inbox, seen = Inbox(), []
    assert inbox.due == math.inf
    inbox.clock(1.0)
    inbox.post(seen.append, "first")
    inbox.clock(2.0)
    inbox.post(seen.append, "second")
    assert inbox.due == 1.0
    inbox.take()
    assert inbox.due == 2.0
    inbox.take()
    assert inbox.due == math.inf
    assert seen == ["first", "second"]
    assert inbox.count == 2


def test_an_abort_is_told_once_to_the_step_within_which_it_came() -> None:
    inbox, seen = Inbox(), []
    inbox.clock(1.0)
    inbox.post_abort(seen.append, 7)
    assert inbox.aborts_within(1.0) == []
    assert inbox.aborts_within(1.5) == [7]
    assert inbox.aborts_within(1.5) == []
    inbox.take()
    assert seen == [7]


def test_an_abort_at_a_boundary_is_an_input_like_others() -> None:
    inbox = Inbox()
    inbox.clock(1.0)
    inbox.post_abort(lambda attempt: None, 7)
    inbox.forget_aborts(1.0)
    assert inbox.aborts_within(2.0) == []


def test_time_does_not_go_back() -> None:
    inbox = Inbox()
    inbox.clock(5.0)
    with pytest.raises(ValueError, match=r"time went back from 5\.0 to 4\.0"):
        inbox.clock(4.0)
