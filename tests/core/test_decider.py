"""Who is asked after an event, and in which order; the whole is in test_scheduler."""

from __future__ import annotations

from collections import Counter

import pytest

from rollout_sched.core.model.actions import Deliver, Dispatch, UpdateWeights
from rollout_sched.core.model.events import (
    BatchRequested,
    Event,
    InstanceJoined,
    InstanceReported,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    TokensArrived,
    TurnFinished,
    WeightsPublished,
    WeightsUpdated,
    Woke,
)
from rollout_sched.core.model.records import Launch
from rollout_sched.core.model.roles import Progress
from tests.core.told import BIG, FULLY_ASYNC, Told, delivered, with_roles


def test_a_batch_goes_before_its_place_is_filled() -> None:
    told = Told(slots=1, **FULLY_ASYNC)
    told.submit("a", "b")
    told(BatchRequested())
    orders = told(RequestFinished("a/0", 1, 5))
    assert [type(action) for action in orders] == [Deliver, Dispatch]


def test_weights_go_before_work() -> None:
    told = Told(slots=1, **FULLY_ASYNC)
    told.submit("a", "b")
    told(WeightsPublished(1))
    orders = told(RequestFinished("a/0", 1, 5))
    assert [type(action) for action in orders] == [UpdateWeights]
    assert [type(action) for action in told(WeightsUpdated("i0", 1))] == [Dispatch]


class Counting:
    """A batching that keeps count of how often it is asked; one group is a batch."""

    stops_at_delivery = False

    part_prompts = 0

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def launch(self, progress: Progress) -> Launch | None:
        self.asked["launch"] += 1
        return Launch(fresh=progress.fresh)

    def batch(self, progress: Progress) -> int:
        self.asked["batch"] += 1
        return min(progress.complete, 1)


class TestWhoIsAsked:
    """Most events are answers, so they must not ask the group-level roles for nothing."""

    @pytest.fixture
    def batching(self) -> Counting:
        return Counting()

    @pytest.fixture
    def told(self, batching: Counting) -> Told:
        told = with_roles(Told(instances=0, freshness="unbounded"), batching=batching)
        told(BatchRequested(), InstanceJoined("i0", 16, BIG))
        told.submit("a", samples=3)
        batching.asked.clear()
        return told

    @pytest.mark.parametrize(
        "answer",
        [
            RequestFinished("a/0", 1, 5),
            RequestInterrupted("a/0", 1, 5),
            RequestFailed("a/0", 1),
            TurnFinished("a/0", 1, 5),
            TokensArrived("a/0", 1, 5),
            InstanceReported("i0", 3, 0, 0.5),
            Woke(),
        ],
    )
    def test_nobody_when_no_group_completed(
        self, told: Told, batching: Counting, answer: Event
    ) -> None:
        told(answer)
        assert not batching.asked

    def test_once_when_a_group_completed(self, told: Told, batching: Counting) -> None:
        told(RequestFinished("a/0", 1, 5), RequestFinished("a/1", 2, 5))
        assert not batching.asked
        assert delivered(told(RequestFinished("a/2", 3, 5))) == ["a/0", "a/1", "a/2"]
        assert batching.asked == {"batch": 1, "launch": 1}

    def test_a_batch_is_asked_for_only_while_the_trainer_waits(
        self, told: Told, batching: Counting
    ) -> None:
        told(*(RequestFinished(f"a/{index}", index + 1, 5) for index in range(3)))
        batching.asked.clear()
        told.submit("b")
        assert batching.asked == {"launch": 1}
