"""The event queue: callbacks are called in order of time, and of planning among equals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.simulators.replay.event_queue import EventQueue


def run(queue: EventQueue) -> None:
    while len(queue):
        queue.step()


def test_equal_times_keep_their_order() -> None:
    queue = EventQueue()
    done: list[str] = []
    for name in "abc":
        queue.at(2.0, done.append, name)
    queue.at(1.0, done.append, "first")
    run(queue)
    assert done == ["first", "a", "b", "c"]
    assert queue.now == 2.0


def test_a_deed_may_plan_deeds_for_the_same_instant() -> None:
    queue = EventQueue()
    done: list[str] = []
    queue.at(1.0, lambda _: queue.after(0.0, done.append, "planned"))
    queue.at(1.0, done.append, "second")
    run(queue)
    assert done == ["second", "planned"]


def test_the_past_is_now() -> None:
    queue, done = EventQueue(), []
    queue.at(5.0, lambda _: queue.at(1.0, lambda _: done.append(queue.now)))
    run(queue)
    assert done == [5.0]


def test_nothing_planned_is_an_error() -> None:
    with pytest.raises(IndexError):
        EventQueue().step()


@given(st.lists(st.floats(0, 10), max_size=30))
def test_time_never_goes_back(times: list[float]) -> None:
    queue, done = EventQueue(), []
    for number, time in enumerate(times):
        queue.at(time, lambda number: done.append((queue.now, number)), number)
    run(queue)
    assert done == sorted((time, number) for number, time in enumerate(times))
