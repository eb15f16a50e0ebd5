"""Where the instance-seconds go, from short journals."""

from __future__ import annotations

import pytest

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.records import RunState
from tests.metrics.tape import Tape, deliver, sample


class TestIdleBubble:
    def test_nobody_works(self) -> None:
        tape = Tape()
        tape.join("i", "j")
        assert tape.idle(10.0) == {"barrier": 1.0}

    def test_others_work(self) -> None:
        tape = Tape()
        tape.join("i", "j")
        tape.start(0, ("a/0", "i"))
        tape.finish(6, "a/0", 1, 5)
        # j is idle for 6 of 20 instance-seconds while i works, both for 4 s more.
        assert tape.idle(10.0) == {"queue_empty": 0.3, "barrier": 0.4}

    def test_weights_are_loaded(self) -> None:
        tape = Tape()
        tape.join("i", "j")
        tape.start(0, ("a/0", "i"))
        tape.at(2, ev.WeightsPublished(1), act.UpdateWeights("j", 1))
        tape.at(5, ev.WeightsUpdated("j", 1))
        tape.finish(10, "a/0", 1, 5)
        assert tape.idle(10.0) == {"weight_update": 3 / 20, "queue_empty": 7 / 20}

    def test_one_that_does_not_join_again_after_a_restart_is_gone(self) -> None:
        tape = Tape()
        tape.join("i", "j")
        tape.start(0, ("a/0", "i"))
        tape.at(4, ev.Restored(RunState()))
        tape.join("i", now=4)
        # j is idle for 4 of 14 instance-seconds, i for 6.
        assert tape.idle(10.0) == {"queue_empty": 4 / 14, "barrier": 6 / 14}

    def test_what_is_lent_to_the_trainer_is_not_of_the_fleet(self) -> None:
        tape = Tape()
        tape.join("i", "j")
        tape.start(0, ("a/0", "i"))
        tape.at(2, ev.Woke(), act.Lend("j"))
        tape.at(8, ev.InstanceReturned("j"))
        tape.finish(10, "a/0", 1, 5)
        # j is idle for 4 of 14 instance-seconds, and away for 6.
        assert tape.idle(10.0) == {"queue_empty": 4 / 14}

    def test_one_that_is_lost_while_it_is_lent_does_not_count_twice(self) -> None:
        tape = Tape()
        tape.join("i", "j")
        tape.start(0, ("a/0", "i"))
        tape.at(2, ev.Woke(), act.Lend("j"))
        tape.at(4, ev.InstanceLost("j"))
        tape.at(5, ev.InstanceReturned("j"))
        tape.finish(10, "a/0", 1, 5)
        assert tape.idle(10.0) == {"queue_empty": 2 / 12}

    def test_an_instance_paused_in_the_middle_of_its_work_is_idle(self) -> None:
        tape = Tape()
        tape.join("i")
        tape.start(0, ("a/0", "i"))
        tape.at(2, ev.WeightsPublished(1), act.Pause("i", "keep", False))
        tape.at(3, ev.InstancePaused("i"), act.UpdateWeights("i", 1))
        tape.at(6, ev.WeightsUpdated("i", 1), act.Resume("i"))
        tape.finish(10, "a/0", 1, 5)
        assert tape.idle(10.0) == {"weight_update": 0.4}
        assert tape.vacant(10.0) == {"weight_update": 0.4, "queue_empty": 0.6 * 3 / 4}

    def test_tools_work(self) -> None:
        tape = Tape()
        tape.join("i", "j")
        tape.start(0, ("a/0", "i"), ("b/0", "j"))
        tape.at(2, ev.TurnFinished("a/0", 1, 5))
        tape.at(7, ev.ToolReturned("a/0", 1, 3), tape.dispatch("a/0", "i", computed=15))
        tape.at(10, ev.RequestFinished("a/0", 3, 5))
        assert tape.idle(10.0) == {"tool_wait": 5 / 20}

    def test_tools_are_waited_for_even_if_nothing_is_in_flight(self) -> None:
        tape = Tape()
        tape.join("i", "j")
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
    def test_nobody_waits_for_the_tool_of_a_trajectory_that_is_over(
        self, event: ev.Event, actions: tuple[act.Action, ...]
    ) -> None:
        tape = Tape()
        tape.join("i")
        tape.start(0, ("a/0", "i"))
        tape.at(4, ev.TurnFinished("a/0", 1, 5))
        tape.at(6, event, *actions)
        tape.start(8, ("b/0", "i"))
        tape.finish(10, "b/0", 2, 5)
        assert tape.idle(10.0)["tool_wait"] == 0.2

    def test_a_busy_instance_has_no_idle_bubble(self) -> None:
        tape = Tape()
        tape.join("i")
        tape.start(0, ("a/0", "i"))
        tape.finish(10, "a/0", 1, 5)
        assert tape.idle(10.0) == {}

    def test_only_instances_that_are_there_count(self) -> None:
        tape = Tape()
        tape.join("i")
        tape.start(0, ("a/0", "i"))
        tape.join("j", now=5)
        tape.at(8, ev.InstanceLost("j"))
        tape.finish(10, "a/0", 1, 5)
        assert tape.idle(10.0) == {"queue_empty": 3 / 13}


class TestOccupancyBubble:
    def test_empty_places_while_others_are_taken(self) -> None:
        tape = Tape(places=4)
        tape.join("i")
        tape.start(0, ("a/0", "i"), ("a/1", "i"), ("a/2", "i"))
        tape.finish(6, "a/0", 1, 5)
        tape.finish(6, "a/1", 2, 5)
        tape.finish(10, "a/2", 3, 5)
        assert tape.vacant(10.0) == {"queue_empty": (6 * 1 + 4 * 3) / 40}
        assert tape.idle(10.0) == {}

    def test_more_than_the_reference_is_full(self) -> None:
        tape = Tape(places=2)
        tape.join("i")
        tape.start(0, *[(f"a/{i}", "i") for i in range(5)])
        tape.finish(10, "a/0", 1, 5)
        assert tape.vacant(10.0) == {}

    def test_barrier(self) -> None:
        tape = Tape(places=4)
        tape.join("i")
        tape.start(0, ("a/0", "i"))
        tape.finish(4, "a/0", 1, 5)
        assert tape.vacant(10.0) == {"queue_empty": 0.4 * 3 / 4, "barrier": 0.6}

    def test_requests_queued_inside_take_no_place(self) -> None:
        tape = Tape(places=4)
        tape.join("i")
        tape.start(0, *[(f"a/{i}", "i") for i in range(4)])
        tape.at(2, ev.InstanceReported("i", 1, 3, 1.0))
        tape.at(6, ev.InstanceReported("i", 4, 0, 0.9))
        tape.finish(10, "a/0", 1, 5)
        assert tape.vacant(10.0) == {"kv_stall": 4 * 3 / 40}

    def test_an_old_report_cannot_stall_more_than_is_in_flight(self) -> None:
        tape = Tape(places=4)
        tape.join("i")
        tape.start(0, ("a/0", "i"))
        tape.at(0, ev.InstanceReported("i", 1, 3, 1.0))
        tape.finish(10, "a/0", 1, 5)
        assert tape.vacant(10.0) == {"kv_stall": 1 / 4, "queue_empty": 3 / 4}

    def test_tools(self) -> None:
        tape = Tape(places=4)
        tape.join("i")
        tape.start(0, ("a/0", "i"), ("a/1", "i"))
        tape.at(2, ev.TurnFinished("a/0", 1, 5))
        tape.finish(10, "a/1", 2, 5)
        # 2 s with two empty places, 8 s with three of which one is waiting for its tool.
        assert tape.vacant(10.0) == {
            "queue_empty": (2 * 2 + 8 * 2) / 40,
            "tool_wait": 8 * 1 / 40,
        }


class TestColocatedTraining:
    def test_the_fleet_waits_at_the_barrier_whatever_is_in_flight(self) -> None:
        tape = Tape(places=4, colocated=True)
        tape.join("i", "j")
        tape.start(0, ("a/0", "i"), ("b/0", "j"))
        tape.finish(4, "a/0", 1, 5, deliver(sample("a/0")))
        tape.at(9, ev.WeightsPublished(1))
        tape.finish(10, "b/0", 2, 5, deliver(sample("b/0"), version=1))
        assert tape.idle(10.0) == {"barrier": 10 / 20, "queue_empty": 1 / 20}
        assert tape.vacant(10.0) == {"barrier": 10 / 20, "queue_empty": (4 * 6 + 4 + 3) / 4 / 20}

    def test_elsewhere_generation_goes_on(self) -> None:
        tape = Tape(places=4)
        tape.join("i", "j")
        tape.start(0, ("a/0", "i"), ("b/0", "j"))
        tape.finish(4, "a/0", 1, 5, deliver(sample("a/0")))
        tape.at(9, ev.WeightsPublished(1))
        tape.finish(10, "b/0", 2, 5)
        assert tape.idle(10.0) == {"queue_empty": 6 / 20}

    def test_the_last_training_step_has_the_gpus_too(self) -> None:
        tape = Tape(colocated=True)
        tape.join("i")
        tape.start(0, ("a/0", "i"))
        tape.finish(4, "a/0", 1, 5, deliver(sample("a/0")))
        assert tape.idle(10.0) == {"barrier": 0.6}
