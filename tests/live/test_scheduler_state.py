"""What a scheduler says of itself: as its last event has left it."""

from __future__ import annotations

from rollout_sched.core.model.events import (
    BatchRequested,
    InstanceLost,
    RequestFinished,
    SubmissionsClosed,
    WeightsPublished,
)
from rollout_sched.core.state.groups import HERE
from rollout_sched.live.live_scheduler import scheduler_state
from tests.core.told import Told


def test_queues_and_groups() -> None:
    told = Told(2, slots=1)
    told.submit("a", "b", "c")
    told(BatchRequested())
    state = scheduler_state(told.scheduler.view)
    assert state["requests"] == {"in_flight": 1, "waiting": 1, "parked": 0}
    assert set(state["groups"]) == {*map(str, HERE), "delivered"}
    assert (state["groups"]["active"], state["groups"]["fresh"]) == (2, 1)
    assert (state["prompts_per_step"], state["trainer_waiting"], state["joined"]) == (2, True, 1)


def test_how_far_it_is() -> None:
    told = Told()
    told.submit("a")
    told(BatchRequested(), RequestFinished("a/0", 1, 5))
    told(WeightsPublished(1), SubmissionsClosed(), InstanceLost("nobody"))
    state = scheduler_state(told.scheduler.view)
    assert (state["batches"], state["in_batch"], state["groups"]["delivered"]) == (1, 0, 1)
    assert (state["version"], state["closed"]) == (1, True)
    assert state["anomalies"] == {"unknown_instance": 1}
