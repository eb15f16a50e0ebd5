"""After a restart nothing is sent before the fleet is here again, or has been waited for."""

from __future__ import annotations

from collections import Counter

from rollout_sched.core.decide.order import PATIENCE_S
from rollout_sched.core.model.actions import Action, Dispatch, UpdateWeights, Wake
from rollout_sched.core.model.events import (
    BatchRequested,
    GroupSubmitted,
    InstanceJoined,
    InstanceLost,
    Restored,
    WeightsPublished,
    WeightsUpdated,
    Woke,
)
from rollout_sched.core.restart.facts import state_of
from tests.core.told import BIG, LIMIT, PROMPT, Told

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


def test_the_first_to_join_does_not_get_all_of_it() -> None:
    told = restarted()
    assert dispatched(told(joined("a"))) == {}
    assert dispatched(told(joined("b"))) == {"a": 4, "b": 4}


def test_who_loads_weights_is_waited_for() -> None:
    told = restarted(version=1)
    assert told(joined("a", 0)) == [UpdateWeights("a", 1)]
    assert dispatched(told(joined("b", 1))) == {}
    assert dispatched(told(WeightsUpdated("a", 1))) == {"a": 4, "b": 4}


def test_nobody_is_waited_for_too_long() -> None:
    told = restarted()
    told(joined("a"))
    told.seconds = NOW + PATIENCE_S
    assert dispatched(told(Woke())) == {"a": 8}


def test_it_is_over_once_and_for_all() -> None:
    told = restarted()
    told(joined("a"), joined("b"), InstanceLost("b"))
    assert told.scheduler.decider.gathering.expected == 0
    assert len(told.running) == 8


def test_where_nobody_was_nobody_is_waited_for() -> None:
    assert dispatched(restarted(instances=0)(joined("a"))) == {"a": 8}


def test_who_dies_meanwhile_waits_for_as_many() -> None:
    told = restarted(instances=3)
    told(joined("a"))
    assert state_of(told.scheduler, NOW).run.instances == 3
