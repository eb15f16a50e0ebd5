"""The steps of a live run are those of its journal, and cost nothing where there are none."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rollout_sched.core.model.actions import Action, Deliver, Dispatch
from rollout_sched.core.model.events import (
    Event,
    InstanceJoined,
    RequestFinished,
    RequestSubmitted,
    Woke,
)
from rollout_sched.metrics.live import LiveSteps
from rollout_sched.metrics.steps import Step
from rollout_sched.metrics.summary import Metrics
from tests.helpers import make_scenario, make_trace, watch


def test_they_are_those_of_the_journal() -> None:
    trace = make_trace({f"g{number}": [3 + number, 20, 7] for number in range(8)})
    ran = watch("tail_batching", trace, make_scenario(instances=2, prompts_per_step=2))
    told: list[tuple[int, Step]] = []
    live, whole = LiveSteps(lambda number, step: told.append((number, step))), Metrics(8)
    for now, event, actions in ran.log:
        live.observe(now, event, actions)
        whole.observe(now, event, actions)
    assert len(told) == 4
    assert [number for number, _ in told] == [1, 2, 3, 4]
    # The occupancy bubble, which is not shown, is of a batch that nobody here knows.
    plain = [replace(step, vacant_s={}) for step in whole.steps]
    assert [replace(step, vacant_s={}) for _, step in told] == plain
    assert live.last is told[-1][1]
    assert live.capacity_s == pytest.approx(sum(step.capacity_s for step in plain))
    assert live.trainer_wait_s == sum(step.trainer_wait_s for step in plain)
    idle_s = sum(sum(step.idle_s.values()) for step in plain)
    assert sum(live.idle_s.values()) == pytest.approx(idle_s)
    assert live.duration.sum == pytest.approx(plain[-1].end_s)


def test_without_a_trainer_nothing_is_folded() -> None:
    live = LiveSteps()
    live.observe(1.0, RequestSubmitted("r", "r", 3, 9), [])
    live.observe(2.0, RequestFinished("r", 1, 5), [])
    assert live._metrics is None


def test_where_there_is_a_trainer_already_it_counts_from_the_beginning() -> None:
    steps = LiveSteps()
    assert steps.delivered == ()
    steps.begin(3.0)
    tape: list[tuple[float, Event, list[Action]]] = [
        (3.0, InstanceJoined("i", 8, 1000), []),
        (3.0, Woke(), [Dispatch("a/0", 1, "i", 10, 20, 0, group="a")]),
        (5.0, RequestFinished("a/0", 1, 5), [Deliver(0, 0, (), 0, True)]),
    ]
    for now, event, actions in tape:
        steps.observe(now, event, actions)
    assert [step.end_s for step in steps.delivered] == [5.0]
    assert steps.duration.sum == 2.0, "from when it began to count"
