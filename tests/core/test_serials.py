"""Serials: numbers in order, which go on from any of them."""

from __future__ import annotations

from rollout_sched.core.model.records import Serials


def test_they_count_from_one_and_go_on_from_the_last() -> None:
    serials = Serials()
    assert [serials.next(), serials.next()] == [1, 2]
    serials.last = 41
    assert serials.next() == 42
