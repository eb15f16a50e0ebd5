"""Inputs take effect in the order in which they came; aborts are known before."""

from __future__ import annotations

import math

import pytest

from rollout_sched.simulators.instance.engine import Inbox


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
