"""Tokens thrown away or computed again, from short journals."""

from __future__ import annotations

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.records import RunState
from tests.metrics.tape import Tape, deliver, sample


class TestTokens:
    def test_discarded_and_generated(self) -> None:
        tape = Tape("i")
        tape.start(0, ("a/0", "i"), ("a/1", "i"))
        done = deliver(sample("a/0", tokens=9)), act.Discard("a/1", 0, "surplus", ends=True)
        tape.finish(5, "a/0", 1, 9, *done)
        late = ev.RequestInterrupted("a/1", 2, 6)
        tape.at(6, late, act.Discard("a/1", 6, "surplus"))
        summary = tape.metrics.summary(10.0)
        assert summary.discarded_tokens == 6
        assert summary.tokens_per_s == 1.5
        assert summary.accepted_tokens_per_s == 0.9

    def test_unwanted_answers_count_nothing(self) -> None:
        tape = Tape("i")
        tape.start(0, ("a/0", "i"))
        for _ in range(3):
            tape.finish(5, "a/0", 1, 9)
        assert tape.metrics.summary(10.0).tokens_per_s == 0.9
        assert tape.idle(10.0) == {"barrier": 0.5}

    def test_resumed_attempts(self) -> None:
        tape = Tape("i")
        tape.at(0, ev.Woke(), tape.dispatch("a/0", "i"), tape.dispatch("a/1", "i", computed=12))
        assert tape.metrics.summary(1.0).resumed_attempts == 1

    def test_counters_survive_the_death_of_their_instance(self) -> None:
        tape = Tape("i", "j")
        tape.at(1, ev.InstanceReported("i", 0, 0, 0.0, preemptions=3, reprefilled_tokens=100))
        tape.at(2, ev.InstanceReported("i", 0, 0, 0.0, preemptions=5, reprefilled_tokens=170))
        tape.at(2, ev.InstanceReported("j", 0, 0, 0.0, 1, 0, 0, 7, 0, 8, 6))
        tape.at(3, ev.InstanceLost("i"))
        tape.join("i", now=4)  # and starts counting anew
        tape.at(5, ev.InstanceReported("i", 0, 0, 0.0, preemptions=2, reprefilled_tokens=20))
        summary = tape.metrics.summary(6.0)
        assert summary.preemptions == 5 + 2 + 1
        assert summary.reprefilled_tokens == 170 + 20 + 7
        assert (summary.drafted_tokens, summary.draft_acceptance) == (8, 0.75)

    def test_a_restart_nobody_noticed_keeps_them_too(self) -> None:
        tape = Tape("i")
        tape.at(1, ev.InstanceReported("i", 0, 0, 0.0, preemptions=3))
        tape.join("i", now=4)
        assert tape.metrics.summary(6.0).preemptions == 3

    def test_counters_continue_after_a_scheduler_restart(self) -> None:
        tape = Tape("i", "j")
        tape.at(1, ev.InstanceReported("i", 0, 0, 0.0, preemptions=3))
        tape.at(1, ev.InstanceReported("j", 0, 0, 0.0, preemptions=4))
        tape.at(2, ev.Restored(RunState()))
        tape.join("i", now=2)
        assert tape.metrics.summary(6.0).preemptions == 3 + 4
        tape.at(3, ev.InstanceReported("i", 0, 0, 0.0, preemptions=5))
        assert tape.metrics.summary(6.0).preemptions == 5 + 4

    def test_tokens_of_a_lost_instance_are_wasted(self) -> None:
        tape = Tape("i", "j")
        tape.start(0, ("a/0", "i"))
        tape.at(4, ev.InstanceLost("i"))
        tape.finish(8, "a/0", 1, 9)  # too late to be true
        assert tape.idle(10.0) == {"queue_empty": 4 / 14, "barrier": 6 / 14}

    def test_a_tool_may_outlive_the_instance_that_asked(self) -> None:
        tape = Tape("i", "j")
        tape.start(0, ("a/0", "i"))
        tape.at(2, ev.TurnFinished("a/0", 1, 5))
        tape.at(4, ev.InstanceLost("i"))
        tape.at(6, ev.ToolReturned("a/0", 1, 3), tape.dispatch("a/0", "j", computed=15))
        tape.finish(10, "a/0", 2, 5)
        assert tape.idle(10.0) == {"tool_wait": 2 / 14, "queue_empty": 6 / 14}


class TestCauses:
    def test_tokens_thrown_away_by_the_reason(self) -> None:
        tape = Tape("i")
        tape.start(0, ("a/0", "i"), ("b/0", "i"))
        gone = act.Discard("a/0", 9, "filtered", ends=True, group="a")
        tape.finish(5, "a/0", 1, 9)
        tape.at(6, ev.GroupJudged("a", 4, "filtered"), gone)
        tape.at(7, ev.GroupJudged("b", 5, "kept"))
        tape.at(8, ev.Woke(), act.Discard("b/0", 3, "stale"), act.Discard("c/0", 0, "surplus"))
        summary = tape.metrics.summary(10.0)
        assert summary.discarded_tokens_by_cause == {"filtered": 9, "stale": 3}
        assert summary.discarded_tokens == 12
        assert summary.filtered_groups == 1
