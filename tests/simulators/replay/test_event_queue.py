"""Clockwork: deeds happen in order of time, and of planning among equals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.simulators.replay.event_queue import Clockwork


def run(clock: Clockwork) -> None:
    while len(clock):
        clock.step()


def test_equal_times_keep_their_order() -> None:
    clock = Clockwork()
    done: list[str] = []
    for name in "abc":
        clock.at(2.0, done.append, name)
    clock.at(1.0, done.append, "first")
    run(clock)
    assert done == ["first", "a", "b", "c"]
    assert clock.now == 2.0


def test_a_deed_may_plan_deeds_for_the_same_instant() -> None:
    clock = Clockwork()
    done: list[str] = []
    clock.at(1.0, lambda _: clock.after(0.0, done.append, "planned"))
    clock.at(1.0, done.append, "second")
    run(clock)
    assert done == ["second", "planned"]


def test_the_past_is_now() -> None:
    clock, done = Clockwork(), []
    clock.at(5.0, lambda _: clock.at(1.0, lambda _: done.append(clock.now)))
    run(clock)
    assert done == [5.0]


def test_nothing_planned_is_an_error() -> None:
    with pytest.raises(IndexError):
        Clockwork().step()


@given(st.lists(st.floats(0, 10), max_size=30))
def test_time_never_goes_back(times: list[float]) -> None:
    clock, done = Clockwork(), []
    for number, time in enumerate(times):
        clock.at(time, lambda number: done.append((clock.now, number)), number)
    run(clock)
    assert done == sorted((time, number) for number, time in enumerate(times))
