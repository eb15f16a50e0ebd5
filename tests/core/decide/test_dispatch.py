"""Which request goes where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from rollout_sched.core.errors import PolicyError
from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.events import (
    BatchRequested,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    RequestFinished,
    RequestSubmitted,
    ToolReturned,
    TrajectoryEnded,
    TurnFinished,
)
from rollout_sched.core.model.model import RequestState
from rollout_sched.core.model.roles import FleetView, Migrant, Migration, Routing
from tests.core.told import (
    BIG,
    FULLY_ASYNC,
    LIMIT,
    PROMPT,
    Told,
    begun,
    dispatched,
    sent,
    thrown,
    with_roles,
)


class TestSessions:
    """Two trajectories at once may have their KV on an instance."""

    TWO: ClassVar[dict[str, Any]] = {"use": "aimd_concurrency", "longest": BIG // 2}

    def test_trajectory_between_turns_keeps_its_session(self) -> None:
        told = Told(admission=self.TWO)
        told.submit("a", samples=3)
        assert dispatched(told(BatchRequested())) == ["a/0", "a/1"]
        assert told(TurnFinished("a/0", 1, 5)) == []
        assert told.instance("i0").sessions == 2
        assert dispatched(told(ToolReturned("a/0", 1, 5))) == ["a/0"], "before a/2, which is new"
        assert dispatched(told(RequestFinished("a/0", 3, 5))) == ["a/2"]

    def test_trajectory_ended_by_a_tool_frees_its_session(self) -> None:
        told = begun("a", samples=3, admission=self.TWO)
        told(TurnFinished("a/0", 1, 5))
        assert dispatched(told(TrajectoryEnded("a/0", 1))) == ["a/2"]

    def test_failed_group_frees_its_sessions(self) -> None:
        told = Told(2, admission=self.TWO)
        told.submit("a", samples=2)
        told.submit("b")
        told(BatchRequested(), TurnFinished("a/0", 1, 5), TurnFinished("a/1", 2, 5))
        assert dispatched(told(TrajectoryEnded("a/0", 1, "failed"))) == ["b/0"]
        assert told.instance("i0").sessions == 1

    def test_another_instance_that_takes_new_ones_is_found(self) -> None:
        told = begun("a", samples=5, instances=2, slots=2, admission=self.TWO)
        told(TurnFinished("a/0", 1, 5))
        told(RequestFinished("a/1", 2, 5))
        assert told.running == ["a/2", "a/3", "a/4"]
        assert [told.instance(i).in_flight for i in ("i0", "i1")] == [1, 2]

    def test_lost_instance_is_no_home(self) -> None:
        told = begun("a", samples=2, slots=1, admission=self.TWO)
        told(TurnFinished("a/0", 1, 5))
        assert told.running == ["a/1"]
        told(ToolReturned("a/0", 1, 5))
        assert told.request("a/0").kv_instance is told.instance("i0"), "it waits for the slot"
        told(InstanceLost("i0"))
        assert told.request("a/0").kv_instance is None
        assert dispatched(told(InstanceJoined("i1", 2, BIG))) == ["a/0", "a/1"]

    def test_trajectory_returning_to_a_full_cache_releases_its_kv(self) -> None:
        told = Told(admission={"use": "session_cap", "fill": 30 / BIG, "overfill": 30 / BIG})
        told.submit("a", samples=2)
        told(BatchRequested(), TurnFinished("a/0", 1, 30), InstanceReported("i0", 1, 0, 0.0))
        assert told(ToolReturned("a/0", 1, 5)) == []
        assert told.request("a/0").kv_instance is None
        assert dispatched(told(RequestFinished("a/1", 2, 5))) == ["a/0"]

    def test_report_that_frees_sessions_starts_requests(self) -> None:
        told = begun("a", samples=1, admission={"use": "session_cap", "fill": 1.0})
        told(InstanceReported("i0", 1, 0, 0.9))
        told(RequestSubmitted("d", "", PROMPT, LIMIT))
        assert told.running == ["a/0"]
        assert dispatched(told(InstanceReported("i0", 1, 0, 0.4))) == ["d"]


def test_routing_to_a_closed_instance() -> None:
    told = Told(instances=2, slots=1, **FULLY_ASYNC)
    told.submit("a")
    full = told.instance("i0")

    class Stubborn(Routing):
        def load(self, instance: Any) -> int:
            return 0

        def choose(self, request: Any, fleet: Any) -> Any:
            return full

    told.scheduler.roles.routing = Stubborn()
    with pytest.raises(PolicyError, match="which is not open"):
        told.submit("b")


def test_routing_may_let_a_request_wait() -> None:
    class Patient(Routing):
        def load(self, instance: Any) -> int:
            return 0

        def choose(self, request: Any, fleet: Any) -> Any:
            return None

    told = with_roles(Told(instances=0), routing=Patient())
    told.submit("a")
    told(InstanceJoined("i0", 8, BIG))
    assert told(BatchRequested()) == []
    assert told.request("a/0").state is RequestState.WAITING


PARTIAL: dict[str, Any] = {"use": "partial", "at_update": "in_place"}


class Scripted(Migration):
    """A migration that does as it is told: request -> where it is to go on."""

    interval_s = 10.0

    def __init__(self) -> None:
        self.plan: dict[str, str] = {}
        self.asked = 0

    def choose(self, fleet: FleetView) -> Sequence[Migrant]:
        self.asked += 1
        running = [a for i in fleet.instances.values() for a in i.attempts.values()]
        plan, self.plan = self.plan, {}
        return [
            Migrant(attempt, fleet.instances[plan[attempt.request.id]])
            for attempt in running
            if attempt.request.id in plan and not attempt.abandoned
        ]


class World(Told):
    """Two instances, on each of which one of a's two requests runs."""

    def __init__(self, *, samples: int = 2, **roles: Any) -> None:
        roles = {"instances": 2} | FULLY_ASYNC | roles
        super().__init__(migration={"use": f"{__name__}:Scripted"}, **roles)
        self(ev.BatchRequested())
        self.submit("a", samples=samples)

    @property
    def role(self) -> Scripted:
        role = self.scheduler.roles.migration
        assert isinstance(role, Scripted)
        return role

    def plan(self, **plan: str) -> list[act.Action]:
        """Let the role be asked; "a0" stands for "a/0"."""
        self.role.plan = {f"{name[0]}/{name[1]}": where for name, where in plan.items()}
        self.seconds += 10
        return self(ev.Woke())


def test_a_migrant_goes_on_where_it_was_sent_with_its_tokens() -> None:
    """Although the interruption role keeps none: the weights are the same."""
    world = World()
    assert world.plan(a0="i1") == [act.Interrupt("a/0", 1, "i0")]
    assert world.request("a/0").migrations == 1
    moved = sent("a/0", 3, "i1", context_tokens=PROMPT + 7, max_new_tokens=LIMIT - 7)
    assert world(ev.RequestInterrupted("a/0", 1, 7)) == [
        act.Dispatch(
            **{f: getattr(moved, f) for f in moved.__struct_fields__}
            | {"response_tokens": 7, "computed_tokens": PROMPT + 7}
        )
    ]
    world(ev.RequestFinished("a/1", 2, 5))
    (delivered,) = world(ev.RequestFinished("a/0", 3, 4))
    made = {s.request: [(g.tokens, g.instance) for g in s.segments] for s in delivered.samples}
    assert made == {"a/0": [(7, "i0"), (4, "i1")], "a/1": [(5, "i1")]}


class TestWhenItIsAsked:
    def test_every_interval_at_most(self) -> None:
        world = World()
        world.plan()
        asked = world.role.asked
        world.seconds += 9
        world(ev.Woke())
        assert world.role.asked == asked
        world.seconds += 1
        world(ev.Woke(), ev.Woke())
        assert world.role.asked == asked + 1

    def test_no_migration_while_requests_wait(self) -> None:
        world = World(slots=1, samples=3)
        asked = world.role.asked
        world.plan()
        assert world.role.asked == asked
        world(ev.RequestFinished("a/0", 1, 5))  # its slot is taken at once
        assert world.role.asked == asked
        world(ev.RequestFinished("a/1", 2, 5))
        assert world.role.asked == asked + 1

    def test_no_migration_while_migrants_are_under_way(self) -> None:
        world = World()
        world.plan(a0="i1")
        assert world.plan(a1="i0") == []
        world(ev.RequestInterrupted("a/0", 1, 7))
        assert world.plan(a1="i0") == [act.Interrupt("a/1", 2, "i1")]

    def test_ended_migrant_delays_nothing(self) -> None:
        world = World()
        world.plan(a0="i1")
        world(ev.RequestFinished("a/0", 1, 7))
        assert world.plan(a1="i0") == [act.Interrupt("a/1", 2, "i1")]


class TestInterruptedByOtherEvents:
    """Of a/0, which is to go from i0 to i1."""

    def test_its_turn_ends_first(self) -> None:
        """Its next turn is its next dispatch."""
        world = World()
        world.plan(a0="i1")
        world(ev.TurnFinished("a/0", 1, 9))
        (dispatch,) = world(ev.ToolReturned("a/0", 1, 5))
        assert (dispatch.instance, dispatch.context_tokens) == ("i1", PROMPT + 14)

    def test_its_target_is_lost(self) -> None:
        world = World()
        world.plan(a0="i1")
        world(ev.TokensArrived("a/1", 2, 3))
        (dispatch,) = world(ev.InstanceLost("i1"))
        assert (dispatch.request, dispatch.instance) == ("a/1", "i0")  # type: ignore[union-attr]
        (dispatch,) = world(ev.RequestInterrupted("a/0", 1, 7))
        assert (dispatch.instance, dispatch.response_tokens) == ("i0", 7)

    def test_its_target_fills_up(self) -> None:
        world = World(slots=2, samples=3)
        world.plan(a0="i1")
        world.submit("b")
        (dispatch,) = world(ev.RequestInterrupted("a/0", 1, 7))
        assert isinstance(dispatch, act.Dispatch)
        assert (dispatch.request, dispatch.instance) == ("a/0", "i0")

    def test_its_attempt_fails(self) -> None:
        world = World()
        world.plan(a0="i1")
        (dispatch,) = world(ev.RequestFailed("a/0", 1, "500"))
        assert (dispatch.instance, dispatch.response_tokens) == ("i1", 0)

    def test_its_group_is_whole_without_it(self) -> None:
        world = World(
            instances=3,
            batching={"use": "tail_batching", "over_samples": 1.5},
            freshness="bounded",
        )
        assert world.running == ["a/0", "a/1", "a/2"]
        world.plan(a0="i1")
        world(ev.RequestFinished("a/1", 2, 5))
        actions = world(ev.RequestFinished("a/2", 3, 5))
        assert [type(action) for action in actions] == [act.Discard, act.Deliver]
        assert world(ev.RequestInterrupted("a/0", 1, 7)) == [thrown("a/0", 7, "surplus", attempt=1)]

    def test_its_round_ends_and_its_tokens_are_kept(self) -> None:
        world = Told(
            instances=2,
            batching={"use": "sync", "over_prompts": 2.0},
            freshness="unbounded",
            interruption=PARTIAL,
            migration={"use": f"{__name__}:Scripted"},
        )
        world.submit("a", "b")
        world(ev.BatchRequested())
        role: Any = world.scheduler.roles.migration
        role.plan = {"a/0": "i1"}
        world.seconds += 10
        assert world(ev.Woke()) == [act.Interrupt("a/0", 1, "i0")]
        (delivered,) = world(ev.RequestFinished("b/0", 2, 5))
        assert isinstance(delivered, act.Deliver)  # and no second Interrupt
        assert world(ev.RequestInterrupted("a/0", 1, 7)) == []
        assert [r.id for r in world.scheduler.parts.requests.replay_buffer] == ["a/0"]

    def test_weights_arrive(self) -> None:
        """It waits like everybody, and goes on under the new ones where it was to go."""
        world = World(interruption=PARTIAL, weights={"when": "now"})
        world.plan(a0="i1")
        world(ev.WeightsPublished(1))
        assert world(ev.RequestInterrupted("a/0", 1, 7)) == []
        for name in ("i0", "i1"):
            world(ev.InstancePaused(name))
        actions = world(ev.WeightsUpdated("i0", 1), ev.WeightsUpdated("i1", 1))
        dispatched = [a for a in actions if isinstance(a, act.Dispatch)]
        assert [(d.request, d.instance, d.response_tokens) for d in dispatched] == [
            ("a/0", "i1", 7)
        ]


class TestRefusedMigrations:
    def fails(self, world: World, match: str, **plan: str) -> None:
        with pytest.raises(PolicyError, match=match):
            world.plan(**plan)

    def test_to_stay(self) -> None:
        self.fails(World(), "not open", a0="i0")

    def test_to_go_to_a_closed_instance(self) -> None:
        world = World()
        world(ev.InstanceLeaving("i1"))
        self.fails(world, "not open", a0="i1")

    def test_to_go_to_other_weights(self) -> None:
        world = World(weights={"when": "between_batches"})
        world(ev.WeightsPublished(1), ev.InstanceJoined("i2", 8, 10_000, 1))
        self.fails(world, "another version", a1="i2")

    def test_to_move_a_paused_request(self) -> None:
        world = World(weights="rolling", interruption=PARTIAL)
        world(ev.WeightsPublished(1))
        self.fails(world, "neither serves nor drains", a0="i1")

    def test_to_move_a_stopping_request(self) -> None:
        world = World(weights="rolling", interruption={"use": "partial", "at_update": "resubmit"})
        world(ev.WeightsPublished(1))
        self.fails(world, "does not run", a0="i1")
