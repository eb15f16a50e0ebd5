"""Where the instance-seconds go, from short journals."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.records import RunState
from rollout_sched.metrics.attempts import AttemptIndex
from rollout_sched.metrics.bubbles import SHARES, FleetShares, FleetTimes
from tests.metrics.tape import Tape, deliver, sample
from tests.metrics.told import tell


class TestIdleBubble:
    def test_idle_instance_beside_a_busy_one_has_an_empty_queue(self) -> None:
        tape = Tape("i", "j")
        tape.start(0, ("a/0", "i"))
        tape.finish(6, "a/0", 1, 5)
        # j is idle for 6 of 20 instance-seconds while i works, both for 4 s more.
        assert tape.idle(10.0) == {"queue_empty": 0.3, "barrier": 0.4}

    def test_weights_are_loaded(self) -> None:
        tape = Tape("i", "j")
        tape.start(0, ("a/0", "i"))
        tape.at(2, ev.WeightsPublished(1), act.UpdateWeights("j", 1))
        tape.at(5, ev.WeightsUpdated("j", 1))
        tape.finish(10, "a/0", 1, 5)
        assert tape.idle(10.0) == {"weight_update": 3 / 20, "queue_empty": 7 / 20}

    def test_instance_that_does_not_rejoin_after_a_restart_is_gone(self) -> None:
        tape = Tape("i", "j")
        tape.start(0, ("a/0", "i"))
        tape.at(4, ev.Restored(RunState()))
        tape.join("i", now=4)
        # j is idle for 4 of 14 instance-seconds, i for 6.
        assert tape.idle(10.0) == {"queue_empty": 4 / 14, "barrier": 6 / 14}

    def test_lent_instance_is_not_in_the_fleet(self) -> None:
        tape = Tape("i", "j")
        tape.start(0, ("a/0", "i"))
        tape.at(2, ev.Woke(), act.Lend("j"))
        tape.at(8, ev.InstanceReturned("j"))
        tape.finish(10, "a/0", 1, 5)
        # j is idle for 4 of 14 instance-seconds, and away for 6.
        assert tape.idle(10.0) == {"queue_empty": 4 / 14}

    def test_an_instance_paused_in_the_middle_of_its_work_is_idle(self) -> None:
        tape = Tape("i")
        tape.start(0, ("a/0", "i"))
        tape.at(2, ev.WeightsPublished(1), act.Pause("i", "keep", False))
        tape.at(3, ev.InstancePaused("i"), act.UpdateWeights("i", 1))
        tape.at(6, ev.WeightsUpdated("i", 1), act.Resume("i"))
        tape.finish(10, "a/0", 1, 5)
        assert tape.idle(10.0) == {"weight_update": 0.4}
        assert tape.vacant(10.0) == {"weight_update": 0.4, "queue_empty": 0.6 * 3 / 4}

    def test_tools_are_waited_for_even_if_nothing_is_in_flight(self) -> None:
        tape = Tape("i", "j")
        tape.start(0, ("a/0", "i"))
        tape.at(4, ev.TurnFinished("a/0", 1, 5))
        tape.at(10, ev.ToolReturned("a/0", 1, 3))
        assert tape.idle(10.0) == {"tool_wait": 6 / 20, "queue_empty": 10 / 20}

    @pytest.mark.parametrize(
        ("event", "actions"),
        [
            (ev.TrajectoryEnded("a/0", 1), ()),
            (ev.Woke(), (act.Discard("a/0", 5, "stale"),)),
            (ev.Woke(), (deliver(sample("a/0")),)),
        ],
    )
    def test_ended_trajectory_waits_for_no_tool(
        self, event: ev.Event, actions: tuple[act.Action, ...]
    ) -> None:
        tape = Tape("i")
        tape.start(0, ("a/0", "i"))
        tape.at(4, ev.TurnFinished("a/0", 1, 5))
        tape.at(6, event, *actions)
        tape.start(8, ("b/0", "i"))
        tape.finish(10, "b/0", 2, 5)
        assert tape.idle(10.0)["tool_wait"] == 0.2

    def test_only_present_instances_count(self) -> None:
        tape = Tape("i")
        tape.start(0, ("a/0", "i"))
        tape.join("j", now=5)
        tape.at(8, ev.InstanceLost("j"))
        tape.finish(10, "a/0", 1, 5)
        assert tape.idle(10.0) == {"queue_empty": 3 / 13}


class TestOccupancyBubble:
    def test_empty_places_while_others_are_taken(self) -> None:
        tape = Tape("i", places=4)
        tape.start(0, ("a/0", "i"), ("a/1", "i"), ("a/2", "i"))
        tape.finish(6, "a/0", 1, 5)
        tape.finish(6, "a/1", 2, 5)
        tape.finish(10, "a/2", 3, 5)
        assert tape.vacant(10.0) == {"queue_empty": (6 * 1 + 4 * 3) / 40}
        assert tape.idle(10.0) == {}

    def test_more_than_the_reference_is_full(self) -> None:
        tape = Tape("i", places=2)
        tape.start(0, *[(f"a/{i}", "i") for i in range(5)])
        tape.finish(10, "a/0", 1, 5)
        assert tape.vacant(10.0) == {}

    def test_requests_queued_inside_take_no_place(self) -> None:
        tape = Tape("i", places=4)
        tape.start(0, *[(f"a/{i}", "i") for i in range(4)])
        tape.at(2, ev.InstanceReported("i", 1, 3, 1.0))
        tape.at(6, ev.InstanceReported("i", 4, 0, 0.9))
        tape.finish(10, "a/0", 1, 5)
        assert tape.vacant(10.0) == {"kv_stall": 4 * 3 / 40}

    def test_an_old_report_cannot_stall_more_than_is_in_flight(self) -> None:
        tape = Tape("i", places=4)
        tape.start(0, ("a/0", "i"))
        tape.at(0, ev.InstanceReported("i", 1, 3, 1.0))
        tape.finish(10, "a/0", 1, 5)
        assert tape.vacant(10.0) == {"kv_stall": 1 / 4, "queue_empty": 3 / 4}

    def test_tools(self) -> None:
        tape = Tape("i", places=4)
        tape.start(0, ("a/0", "i"), ("a/1", "i"))
        tape.at(2, ev.TurnFinished("a/0", 1, 5))
        tape.finish(10, "a/1", 2, 5)
        # 2 s with two empty places, 8 s with three of which one is waiting for its tool.
        assert tape.vacant(10.0) == {
            "queue_empty": (2 * 2 + 8 * 2) / 40,
            "tool_wait": 8 * 1 / 40,
        }


class TestColocatedTraining:
    def test_fleet_at_the_barrier_is_idle_despite_requests_in_flight(self) -> None:
        tape = Tape("i", "j", places=4, colocated=True)
        tape.start(0, ("a/0", "i"), ("b/0", "j"))
        tape.finish(4, "a/0", 1, 5, deliver(sample("a/0")))
        tape.at(9, ev.WeightsPublished(1))
        tape.finish(10, "b/0", 2, 5, deliver(sample("b/0"), version=1))
        assert tape.idle(10.0) == {"barrier": 10 / 20, "queue_empty": 1 / 20}
        assert tape.vacant(10.0) == {"barrier": 10 / 20, "queue_empty": (4 * 6 + 4 + 3) / 4 / 20}

    def test_fleet_outside_a_barrier_keeps_generating(self) -> None:
        tape = Tape("i", "j", places=4)
        tape.start(0, ("a/0", "i"), ("b/0", "j"))
        tape.finish(4, "a/0", 1, 5, deliver(sample("a/0")))
        tape.at(9, ev.WeightsPublished(1))
        tape.finish(10, "b/0", 2, 5)
        assert tape.idle(10.0) == {"queue_empty": 6 / 20}

    def test_the_last_training_step_has_the_gpus_too(self) -> None:
        tape = Tape("i", colocated=True)
        tape.start(0, ("a/0", "i"))
        tape.finish(4, "a/0", 1, 5, deliver(sample("a/0")))
        assert tape.idle(10.0) == {"barrier": 0.6}


BEGIN = act.Dispatch("a/0", 1, "i", 10, 100, 0, group="a")
TURN = (BEGIN, ev.TurnFinished("a/0", 1, 5))


def told(*happened: Any) -> FleetShares:
    """Two instances with four places each, and what happens to them."""
    attempts = AttemptIndex()
    fleet = FleetShares(attempts, 4)
    joined = (ev.InstanceJoined("i", 8, 1000), ev.InstanceJoined("j", 8, 1000))
    for one in (*joined, *happened):
        for fold in (attempts, fleet):
            handle = fold.handlers().get(type(one))
            if handle is not None:
                handle(0.0, one)
    return fleet


def begun(count: int) -> list[act.Dispatch]:
    """So many attempts on the first instance."""
    return [act.Dispatch(f"a/{n}", n, "i", 10, 100, 0, group="a") for n in range(1, count + 1)]


def added(*happened: Any) -> dict[str, float]:
    """By bubble and cause, what is not 0."""
    shares = zip(SHARES, told(*happened).per_second, strict=True)
    return {f"{bubble} {cause}": share for (bubble, cause), share in shares if share}


def test_a_request_fills_a_place() -> None:
    assert added() == {"idle other": 2.0, "vacant other": 2.0}
    assert added(BEGIN) == {"idle other": 1.0, "vacant other": 1.75}


def test_more_than_fill_the_batch_leave_none_vacant() -> None:
    assert added(*begun(6)) == {"idle other": 1.0, "vacant other": 1.0}


def test_instance_loading_weights_does_nothing_else() -> None:
    loading = (*begun(2), act.UpdateWeights("i", 1))
    assert added(*loading)["idle weight_update"] == added(*loading)["vacant weight_update"] == 1.0
    loaded = added(*loading, ev.WeightsUpdated("i", 1))
    assert loaded == {"idle other": 1.0, "vacant other": 1.5}


def test_requests_queued_inside_are_a_kv_stall() -> None:
    stalled = added(*begun(3), ev.InstanceReported("i", 3, 2, 0.5))
    assert stalled == {"idle other": 1.0, "vacant kv_stall": 0.5, "vacant other": 1.25}


def test_request_waiting_for_a_tool_is_not_in_flight() -> None:
    assert told(*TURN).acting == 1
    assert added(*TURN) == {
        "idle tool_wait": 1.0,
        "idle other": 1.0,
        "vacant tool_wait": 0.25,
        "vacant other": 1.75,
    }
    over = (*TURN, *[ev.ToolReturned("a/0", 1, 3)] * 2)
    assert told(*over).acting == 0
    assert added(*over) == {"idle other": 2.0, "vacant other": 2.0}


def test_a_tool_may_outlive_its_instance() -> None:
    outlived = (*TURN, ev.InstanceLost("i"), ev.ToolReturned("a/0", 1, 3))
    assert added(*outlived) == {"idle other": 1.0, "vacant other": 1.0}


def test_lent_instance_adds_nothing_until_returned() -> None:
    lent = (act.Lend("i"), ev.InstanceReported("i", 0, 1, 0.5))
    fleet = told(*lent)
    assert (len(fleet), fleet.here) == (2, 1)
    assert added(*lent) == {"idle other": 1.0, "vacant other": 1.0}
    returned = (*lent, *[ev.InstanceReturned("i")] * 2)
    assert told(*returned).here == 2
    assert added(*returned)["idle other"] == 2.0


def test_instance_lost_while_lent_leaves_once() -> None:
    fleet = told(act.Lend("i"), ev.InstanceLost("i"), ev.InstanceReturned("i"))
    assert (len(fleet), fleet.here) == (1, 1)


def test_empty_fleet_adds_nothing() -> None:
    fleet = told(*begun(3), act.UpdateWeights("j", 1), ev.Restored(RunState()))
    assert fleet.per_second == [0.0] * len(SHARES)
    assert (len(fleet), fleet.here) == (0, 0)


def test_rejoined_instance_starts_empty() -> None:
    rejoined = (*begun(3), ev.InstanceJoined("i", 8, 1000))
    assert told(*rejoined).here == 2
    assert added(*rejoined) == {"idle other": 2.0, "vacant other": 2.0}


def test_time_between_observations_counts_for_the_last_state() -> None:
    states: dict[str, str] = {}
    times = FleetTimes(lambda name: states.get(name, ""))
    states.update(a="idle", b="idle")
    tell(times, [(0.0, ev.InstanceJoined(name, 8, 1000), []) for name in "ab"])
    states["a"] = "busy"
    tell(times, [(2.0, ev.InstanceReported("a", 1, 0, 0.1), [])])
    assert times.seconds(3.0) == {"idle": 2.0 + 3.0, "busy": 1.0}
    states.update(a="pausing", b="updating")
    orders: list[act.Action] = [act.Pause("a", "keep", True), act.UpdateWeights("b", 1)]
    tell(times, [(4.0, ev.WeightsPublished(1), orders)])
    del states["b"]
    tell(times, [(10.0, ev.InstanceLost("b"), [])])
    assert times.seconds(11.0) == {"idle": 2.0 + 4.0, "busy": 2.0, "pausing": 7.0, "updating": 6.0}
