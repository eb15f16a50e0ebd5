"""Why a request waited."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.model.actions import Dispatch, Pause, Resume
from rollout_sched.core.model.events import (
    GroupSubmitted,
    InstanceJoined,
    InstanceLost,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    ToolReturned,
    TurnFinished,
    Woke,
)
from rollout_sched.metrics.attempts import AttemptSpans
from rollout_sched.metrics.fold import Folded
from rollout_sched.metrics.waits import CAUSES, SINCE, Wait, Waits

GROUP = GroupSubmitted("g", 2, 10, 40)


def sent(attempt: int, request: str = "g/0", instance: str = "i") -> Dispatch:
    return Dispatch(request, attempt, instance, 10, 40, 0, group="g")


def last(*entries: tuple[float, Any]) -> tuple[float, str, str]:
    """How long the last one waited, since what, and how the fleet was."""
    waits = Waits()
    folded = Folded(AttemptSpans(waits.closed), waits)
    for now, said in entries:
        acted = isinstance(said, (Dispatch, Pause, Resume))
        folded.observe(now, Woke() if acted else said, [said] if acted else [])
    wait: Wait = waits.last
    return wait.seconds, SINCE[wait.since], CAUSES[wait.cause].partition(":")[0]


def test_wait_with_free_slots() -> None:
    found = last((0.0, InstanceJoined("i", 2, 1000)), (1.0, GROUP), (4.0, sent(1)))
    assert found == (3.0, "it was submitted", "places were free")


def test_wait_with_all_slots_taken() -> None:
    found = last(
        (0.0, InstanceJoined("i", 1, 1000)),
        (0.0, GROUP),
        (1.0, sent(1)),
        (9.0, RequestFinished("g/0", 1, 5)),
        (10.0, sent(2, "g/1")),
    )
    assert found == (10.0, "it was submitted", "all places were taken")


def test_wait_without_instances() -> None:
    found = last((0.0, GROUP), (8.0, InstanceJoined("i", 1, 1000)), (9.0, sent(1)))
    assert found == (9.0, "it was submitted", "no instance was here")


def test_wait_while_all_instances_are_paused() -> None:
    found = last(
        (0.0, InstanceJoined("i", 2, 1000)),
        (1.0, RequestSubmitted("d", "", 10, 40)),
        (1.0, Pause("i", "keep", False)),
        (6.0, Resume("i")),
        (7.0, sent(1, "d")),
    )
    assert found == (6.0, "it was submitted", "all instances were updated, paused or lent")


@pytest.mark.parametrize(
    ("ends", "since"),
    [
        (RequestInterrupted("g/0", 1, 5), "it was interrupted"),
        (RequestFailed("g/0", 1), "an attempt failed"),
        (InstanceLost("i"), "its instance was lost"),
    ],
)
def test_wait_starts_when_the_attempt_ends(ends: Any, since: str) -> None:
    found = last(
        (0.0, InstanceJoined("i", 2, 1000)),
        (0.0, InstanceJoined("j", 2, 1000)),
        (0.0, GROUP),
        (1.0, sent(1)),
        (5.0, ends),
        (7.0, sent(2, instance="j")),
    )
    assert found == (2.0, since, "places were free")


def test_a_tool_is_not_waited_for_but_what_follows_it() -> None:
    found = last(
        (0.0, InstanceJoined("i", 2, 1000)),
        (0.0, GROUP),
        (1.0, sent(1)),
        (5.0, TurnFinished("g/0", 1, 5)),
        (7.0, ToolReturned("g/0", 1, 3)),
        (8.0, sent(2)),
    )
    assert found == (1.0, "its tool returned", "places were free")


def test_instance_present_at_the_start_causes_no_wait() -> None:
    assert last((0.0, InstanceJoined("i", 2, 1000)), (5.0, sent(1)))[0] == 0.0
