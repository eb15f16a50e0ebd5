"""Lending in the core: who makes way for the trainer, and what may come in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollout_sched.core.errors import PolicyError
from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.model import InstanceStatus
from rollout_sched.core.model.roles import FleetView, Instance, Lending, Progress
from tests.core.told import Told, thrown


class Scripted(Lending):
    """A lending that does as it is told."""

    def __init__(self) -> None:
        self.plan: list[str] = []
        self.asked = 0

    def choose(self, fleet: FleetView, progress: Progress) -> Sequence[Instance]:
        self.asked += 1
        return [fleet.instances[name] for name in self.plan]


class World(Told):
    """Of a, b and c, a batch, each runs on an instance of its own."""

    def __init__(self, *, shares_gpus: bool = True, **roles: Any) -> None:
        roles = {"instances": 3, "weights": {"when": "between_batches"}} | roles
        super().__init__(3, lending={"use": f"{__name__}:Scripted"}, **roles)
        self.submit("a", "b", "c", "d", "e", "f")
        self(ev.BatchRequested(shares_gpus=shares_gpus))

    @property
    def role(self) -> Scripted:
        role = self.scheduler.roles.lending
        assert isinstance(role, Scripted)
        return role

    def lend(self, *names: str) -> list[act.Action]:
        """a is whole, so the role is asked."""
        self.role.plan = list(names)
        actions = self(ev.RequestFinished("a/0", 1, 5))
        self.role.plan = []
        return actions

    def status(self, name: str) -> InstanceStatus:
        return self.instance(name).status


def dispatched(actions: Sequence[act.Action]) -> list[tuple[str, str, int]]:
    return [
        (action.request, action.instance, action.response_tokens)
        for action in actions
        if isinstance(action, act.Dispatch)
    ]


def test_idle_instance_is_lent_at_once() -> None:
    world = World()
    assert world.lend("i0") == [act.Lend("i0")]
    assert world.status("i0") is InstanceStatus.LENT


def test_requests_of_a_lent_instance_move_first() -> None:
    world = World()
    assert world.lend("i1") == [act.Interrupt("b/0", 2, "i1")]
    actions = world(ev.RequestInterrupted("b/0", 2, 7))
    assert act.Lend("i1") in actions
    assert dispatched(actions) == [("b/0", "i0", 7)]


def test_returning_an_instance_not_lent_is_an_anomaly() -> None:
    world = World()
    world(ev.InstanceReturned("i0"), ev.InstanceReturned("nobody"))
    assert world.anomalies == {"instance_not_lent": 1, "unknown_instance": 1}


class TestWhenItIsAsked:
    def test_not_for_a_trainer_with_gpus_of_its_own(self) -> None:
        world = World(shares_gpus=False)
        assert world.lend("i0") == []
        assert not world.role.asked

    def test_not_while_anything_waits(self) -> None:
        world = World(instances=1, slots=1)
        world.lend("i0")
        assert not world.role.asked

    def test_once_for_each_batch(self) -> None:
        world = World()
        world.lend("i0")
        world(ev.InstanceReturned("i0"))
        asked = world.role.asked
        world(ev.RequestFinished("b/0", 2, 5))
        assert world.role.asked == asked

    def test_not_when_the_batch_is_whole(self) -> None:
        world = World()
        world.lend()
        world(ev.RequestFinished("b/0", 2, 5))
        world.role.plan = ["i0"]
        actions = world(ev.RequestFinished("c/0", 3, 5))
        assert [type(action) for action in actions] == [act.Deliver]


class TestInterruptedByOtherEvents:
    def test_the_batch_is_whole_before_it_has_made_way(self) -> None:
        """It goes without b, which was not needed for it."""
        world = World(batching={"use": "sync", "over_prompts": 1.33})
        world.lend("i1")
        (delivered, *_) = world(ev.RequestFinished("c/0", 3, 5), ev.RequestFinished("d/0", 4, 5))
        assert isinstance(delivered, act.Deliver)
        assert world.status("i1") is InstanceStatus.SERVING
        assert world(ev.RequestInterrupted("b/0", 2, 7)) == [
            thrown("b/0", 7, "deferred", attempt=2)
        ]

    def test_weights_are_published_before_it_is_back(self) -> None:
        """It holds up nobody, and gets them when it is."""
        world = World()
        world.lend("i0")
        world(ev.RequestFinished("b/0", 2, 5), ev.RequestFinished("c/0", 3, 5))
        updates = [act.UpdateWeights("i1", 1), act.UpdateWeights("i2", 1)]
        assert world(ev.WeightsPublished(1)) == updates
        assert not world.scheduler.state.progress.update_pending
        world(ev.WeightsUpdated("i1", 1), ev.WeightsUpdated("i2", 1))
        actions = world(ev.BatchRequested(shares_gpus=True))
        assert {where for _, where, _ in dispatched(actions)} == {"i1", "i2"}
        assert world(ev.InstanceReturned("i0")) == [act.UpdateWeights("i0", 1)]
        assert world.status("i0") is InstanceStatus.UPDATING

    def test_the_trainer_brings_weights_by_itself_before_it_is_back(self) -> None:
        """What it holds is old until they have been found there: nothing is begun before that."""
        world = World(freshness={"use": "bounded", "max_staleness": 0})
        world.lend("i0")
        assert world(ev.WeightsPublished(1, loads=False))[0] == act.Reclaim("i0")
        world(ev.RequestInterrupted("b/0", 2, 0), ev.RequestInterrupted("c/0", 3, 0))
        world(ev.WeightsUpdated("i1", 1), ev.WeightsUpdated("i2", 1))
        assert world(ev.InstanceReturned("i0")) == []
        assert world.instance("i0").version == 0
        assert {where for _, where, _ in dispatched(world(ev.WeightsUpdated("i0", 1)))} == {
            "i0",
            "i1",
            "i2",
        }

    def test_the_trainer_has_brought_it_weights_when_it_comes_back(self) -> None:
        world = World()
        world.lend("i0")
        world(ev.WeightsPublished(1, loads=False), ev.WeightsUpdated("i0", 1))
        world(ev.InstanceReturned("i0"))
        assert world.instance("i0").version == 1
        assert not world.anomalies

    def test_it_comes_back_before_weights_are_published(self) -> None:
        world = World()
        world.lend("i0")
        world(ev.RequestFinished("b/0", 2, 5), ev.RequestFinished("c/0", 3, 5))
        world(ev.InstanceReturned("i0"))
        updates = world(ev.WeightsPublished(1))
        assert updates == [act.UpdateWeights(name, 1) for name in ("i0", "i1", "i2")]

    def test_it_is_lost(self) -> None:
        world = World()
        world.lend("i0")
        world(ev.InstanceLost("i0"), ev.InstanceReturned("i0"))
        assert world.anomalies == {"unknown_instance": 1}
        world(ev.InstanceJoined("i0", 8, 10_000))
        assert world.status("i0") is InstanceStatus.SERVING

    def test_it_is_to_go_while_it_makes_way(self) -> None:
        world = World()
        world.lend("i1")
        world(ev.InstanceLeaving("i1"))
        actions = world(ev.RequestInterrupted("b/0", 2, 7))
        assert act.Release("i1") in actions
        assert act.Lend("i1") not in actions

    def test_nothing_can_go_on_without_it(self) -> None:
        world = World()
        world.lend("i0", "i1")
        world(ev.RequestInterrupted("b/0", 2, 7))
        assert world(ev.InstanceLost("i2")) == [act.Reclaim("i0"), act.Reclaim("i1")]
        assert world(ev.Woke()) == []  # that was said
        assert dispatched(world(ev.InstanceReturned("i1"))) == [
            ("b/0", "i1", 7),
            ("c/0", "i1", 0),
        ]


class TestRefusedLoans:
    def test_all_that_serve(self) -> None:
        with pytest.raises(PolicyError, match="all serving instances"):
            World().lend("i0", "i1", "i2")

    def test_instance_not_serving_is_not_lent(self) -> None:
        world = World()
        world(ev.InstanceLeaving("i1"))
        with pytest.raises(PolicyError, match="does not serve"):
            world.lend("i1")
