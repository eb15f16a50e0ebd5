"""Who is asked after an event, and in which order; the whole is in test_scheduler."""

from __future__ import annotations

from collections import Counter

import pytest

from rollout_sched.core.decide.order import PATIENCE_S
from rollout_sched.core.model.actions import Action, Deliver, Dispatch, UpdateWeights, Wake
from rollout_sched.core.model.events import (
    BatchRequested,
    Event,
    GroupSubmitted,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    Restored,
    TokensArrived,
    TurnFinished,
    WeightsPublished,
    WeightsUpdated,
    Woke,
)
from rollout_sched.core.model.records import Launch
from rollout_sched.core.model.roles import Batching, Progress
from rollout_sched.core.restart.facts import state_of
from tests.core.told import BIG, FULLY_ASYNC, LIMIT, PROMPT, Told, begun, delivered, with_roles


def test_a_batch_goes_before_its_place_is_filled() -> None:
    told = begun("a", "b", slots=1, **FULLY_ASYNC)
    orders = told(RequestFinished("a/0", 1, 5))
    assert [type(action) for action in orders] == [Deliver, Dispatch]


def test_weights_go_before_work() -> None:
    told = Told(slots=1, **FULLY_ASYNC)
    told.submit("a", "b")
    told(WeightsPublished(1))
    orders = told(RequestFinished("a/0", 1, 5))
    assert [type(action) for action in orders] == [UpdateWeights]
    assert [type(action) for action in told(WeightsUpdated("i0", 1))] == [Dispatch]


class Counting(Batching):
    """A batching that keeps count of how often it is asked; one group is a batch."""

    stops_at_delivery = False

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def launch(self, progress: Progress) -> Launch | None:
        self.asked["launch"] += 1
        return Launch(fresh=progress.fresh)

    def batch(self, progress: Progress) -> int:
        self.asked["batch"] += 1
        return min(progress.complete, 1)


class TestQuestionsToRoles:
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
    def test_no_group_roles_are_asked_without_a_completion(
        self, told: Told, batching: Counting, answer: Event
    ) -> None:
        told(answer)
        assert not batching.asked

    def test_group_roles_are_asked_once_for_a_completion(
        self, told: Told, batching: Counting
    ) -> None:
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


NOW = 100.0


def dispatched(actions: list[Action]) -> dict[str, int]:
    return Counter(action.instance for action in actions if isinstance(action, Dispatch))


def restarted(*, instances: int = 2, version: int = 0) -> Told:
    """In which as many instances were, and a group of eight waits for them."""
    told = Told(1, instances=instances)
    told(GroupSubmitted("g", 8, PROMPT, LIMIT), BatchRequested())
    if version:
        told(WeightsPublished(version))
    following = Told(1, instances=0)
    following.seconds = NOW
    answer = following(Restored(state_of(told.scheduler, NOW)))
    assert answer == ([Wake(NOW + PATIENCE_S)] if instances else [])
    return following


def joined(name: str, version: int = 0) -> InstanceJoined:
    return InstanceJoined(name, 8, BIG, version)


def test_first_instance_does_not_get_all_requests() -> None:
    told = restarted()
    assert dispatched(told(joined("a"))) == {}
    assert dispatched(told(joined("b"))) == {"a": 4, "b": 4}


def test_restart_waits_for_instances_loading_weights() -> None:
    told = restarted(version=1)
    assert told(joined("a", 0)) == [UpdateWeights("a", 1)]
    assert dispatched(told(joined("b", 1))) == {}
    assert dispatched(told(WeightsUpdated("a", 1))) == {"a": 4, "b": 4}


def test_restart_waits_a_limited_time() -> None:
    told = restarted()
    told(joined("a"))
    told.seconds = NOW + PATIENCE_S
    assert dispatched(told(Woke())) == {"a": 8}


def test_restart_wait_ends_for_good() -> None:
    told = restarted()
    told(joined("a"), joined("b"), InstanceLost("b"))
    assert told.scheduler.decider.gathering.expected == 0
    assert len(told.running) == 8


def test_restart_without_instances_waits_for_none() -> None:
    assert dispatched(restarted(instances=0)(joined("a"))) == {"a": 8}


def test_second_restart_waits_for_as_many_instances() -> None:
    told = restarted(instances=3)
    told(joined("a"))
    assert state_of(told.scheduler, NOW).run.instances == 3
