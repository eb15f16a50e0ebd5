"""What the fleet is said to do after each event; what comes of it over time is in test_bubbles."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.metrics.attempts import AttemptIndex
from rollout_sched.metrics.bubbles import SHARES, FleetFold
from tests.metrics.tape import deliver, sample

BEGIN = act.Dispatch("a/0", 1, "i", 10, 100, 0, group="a")


def told(*happened: Any) -> FleetFold:
    """Two instances with two places each, and what happens to them."""
    attempts = AttemptIndex()
    fleet = FleetFold(attempts, 2)
    folds = (attempts, fleet)
    joined = (ev.InstanceJoined("i", 8, 1000), ev.InstanceJoined("j", 8, 1000))
    for one in (*joined, *happened):
        for fold in folds:
            handle = fold.handlers().get(type(one))
            if handle is not None:
                handle(0.0, one)
    return fleet


def idle(fleet: FleetFold) -> dict[str, float]:
    """Instances that are idle, by cause."""
    shares = zip(SHARES, fleet.shares.per_second, strict=True)
    return {cause: share for (bubble, cause), share in shares if bubble == "idle" and share}


@pytest.mark.parametrize(
    "end",
    [
        ev.RequestFinished("a/0", 1, 5),
        ev.RequestInterrupted("a/0", 1, 5),
        ev.RequestFailed("a/0", 1),
    ],
)
def test_an_instance_works_until_its_attempt_ends(end: Any) -> None:
    assert idle(told(BEGIN)) == {"other": 1.0}
    assert idle(told(BEGIN, end)) == {"other": 2.0}


@pytest.mark.parametrize(
    "over",
    [
        ev.ToolReturned("a/0", 1, 3),
        ev.TrajectoryEnded("a/0", 1),
        act.Discard("a/0", 5, "stale", group="a"),
        deliver(sample("a/0", 1)),
    ],
)
def test_it_waits_for_a_tool_until_that_is_over(over: Any) -> None:
    turn = (BEGIN, ev.TurnFinished("a/0", 1, 5))
    assert idle(told(*turn)) == {"tool_wait": 1.0, "other": 1.0}
    assert idle(told(*turn, over)) == {"other": 2.0}


def test_what_an_attempt_has_made_may_go_while_its_tool_works() -> None:
    wasted = act.Discard("a/0", 5, "surplus", attempt=1, group="a")
    turn = (BEGIN, ev.TurnFinished("a/0", 1, 5))
    assert idle(told(*turn, wasted)) == {"tool_wait": 1.0, "other": 1.0}


@pytest.mark.parametrize("order", [act.Pause("j", "keep", False), act.UpdateWeights("j", 1)])
def test_weights_are_its_cause_from_the_first_order_to_the_last_answer(order: Any) -> None:
    assert idle(told(order)) == {"weight_update": 1.0, "other": 1.0}
    assert idle(told(order, ev.WeightsUpdated("j", 1))) == {"other": 2.0}


def test_who_is_lent_or_lost_adds_nothing() -> None:
    assert idle(told(act.Lend("j"))) == {"other": 1.0}
    assert idle(told(act.Lend("j"), ev.InstanceReturned("j"))) == {"other": 2.0}
    assert idle(told(ev.InstanceLost("j"))) == {"other": 1.0}


def test_a_queue_inside_it_is_seen_as_reported() -> None:
    stalled = told(BEGIN, ev.InstanceReported("i", 1, 1, 0.5))
    shares = dict(zip(SHARES, stalled.shares.per_second, strict=True))
    assert shares["vacant", "kv_stall"] == 0.5
