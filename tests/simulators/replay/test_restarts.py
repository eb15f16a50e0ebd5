"""A scheduler that dies, and the one that goes on from what was written down."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.restart.facts import state_of
from rollout_sched.simulators.replay.closed_loop import Restarts
from rollout_sched.simulators.replay.faults import Failing
from rollout_sched.simulators.replay.scenario import TrafficModel
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn, gather
from tests.core.told import make_scheduler
from tests.helpers import Watched, make_policy, make_scenario, watch


def test_a_restarted_scheduler_learns_the_earlier_state() -> None:
    first = make_scheduler()
    restarts = Restarts(first, make_scheduler)
    events = [ev.GroupSubmitted("a", 1, 10, 100), ev.BatchRequested(), ev.InstanceLost("nobody")]
    for event in events:
        restarts.observe(2.0, event, first.handle(event, 2.0))
    second, restored = restarts.restart()
    assert restored == ev.Restored(state_of(first, 2.0))
    assert restarts.anomalies == {"unknown_instance": 1}
    restarts.observe(3.0, restored, second.handle(restored, 3.0))
    third, restored = restarts.restart()
    assert restored == ev.Restored(state_of(second, 3.0))
    assert third is not second


STICKY = make_policy("sticky", routing="session_affinity")


def conversation(
    *turns: Turn, arrival_s: float = 1.0, group: str = "c", sample: int = 0
) -> SampleRecord:
    return SampleRecord(group, sample, 4, turns, arrival_s=arrival_s)


def alone(
    *samples: SampleRecord, patience_s: float = 0.0, max_tokens: int = 0, **world: Any
) -> Watched:
    """No trainer, only these clients."""
    traffic = TrafficModel(patience_s=patience_s, max_tokens=max_tokens)
    scenario = make_scenario(batches=False, traffic=traffic, **world)
    return watch(STICKY, Trace("t", gather(samples)), scenario)


def test_a_client_comes_asks_and_is_answered() -> None:
    ran = alone(conversation(Turn(5)))
    assert ran.said(ev.RequestSubmitted) == [
        (1.0, ev.RequestSubmitted("direct.1", "client/c", 4, 5, ""))
    ]
    ((now, answer),) = ran.said(act.Answer)
    assert (now, answer.sample.response_tokens) == (6.0, 5)
    assert ran.total_s == 6.0
    assert not ran.said(ev.BatchRequested)
    assert not ran.said(ev.SessionEnded), "one question is no conversation"


class TestConversation:
    turns = (Turn(3, 10, 2.5), Turn(2))

    def test_each_turn_is_a_request_of_the_session(self) -> None:
        ran = alone(conversation(*self.turns))
        asked = [
            (now, event.prompt_tokens, event.session, event.group)
            for now, event in ran.said(ev.RequestSubmitted)
        ]
        assert asked == [
            (1.0, 4, "session-0", "client/c"),
            (4.0 + 2.5, 4 + 3 + 10, "session-0", "session-0/1"),
        ]
        assert ran.said(ev.SessionEnded) == [(8.5, ev.SessionEnded("session-0"))]
        assert not ran.scheduler.state.anomalies

    def test_the_next_turn_finds_its_kv_where_the_last_one_was(self) -> None:
        ran = alone(conversation(*self.turns), instances=3, poll_s=1.0)
        assert len({action.instance for _, action in ran.said(act.Dispatch)}) == 1
        report = max((e for _, e in ran.said(ev.InstanceReported)), key=lambda e: e.cached_tokens)
        assert report.cached_tokens == 4 + 3 - 1  # the newest token's KV was never written
        assert report.reprefilled_tokens == 1

    def test_siblings_share_their_prompt_with_each_other(self) -> None:
        one, two = conversation(Turn(5)), conversation(Turn(6), arrival_s=9.0, sample=1)
        ran = alone(one, two, poll_s=1.0)
        assert ran.said(ev.InstanceReported)[-1][1].cached_tokens == 3
        assert len({event.group for _, event in ran.said(ev.RequestSubmitted)}) == 1

    def test_a_cut_answer_is_read_on_from_all_the_same(self) -> None:
        ran = alone(conversation(Turn(9, 1, 1.0), Turn(2)), max_tokens=4)
        finishes = [answer.sample.finish for _, answer in ran.said(act.Answer)]
        assert finishes == ["length", "stop"]
        assert ran.said(ev.RequestSubmitted)[1][1].prompt_tokens == 4 + 4 + 1


class TestPatience:
    def test_an_impatient_client_withdraws_and_leaves(self) -> None:
        ran = alone(conversation(Turn(3, 1, 1.0), Turn(50), Turn(3)), patience_s=10.0)
        assert [now for now, _ in ran.said(ev.RequestWithdrawn)] == [5.0 + 10.0]
        assert len(ran.said(ev.RequestSubmitted)) == 2, "nothing more is asked"
        assert [now for now, _ in ran.said(ev.SessionEnded)] == [15.0]
        assert ran.said(act.Interrupt)

    def test_a_session_that_never_began_is_not_ended(self) -> None:
        ran = alone(conversation(Turn(50), Turn(3)), patience_s=10.0)
        assert not ran.said(ev.SessionEnded)
        assert not ran.scheduler.state.anomalies

    def test_a_client_answered_in_time_does_not_withdraw(self) -> None:
        assert not alone(conversation(Turn(5)), patience_s=5.5).said(ev.RequestWithdrawn)


def test_a_client_whose_request_is_given_up_goes() -> None:
    faults = [Failing(at_s=0.0, blame="request")]
    ran = alone(conversation(Turn(5), Turn(3)), faults=faults)
    ((_, discard),) = ran.said(act.Discard)
    assert (discard.reason, discard.ends) == ("failed", True)
    assert len(ran.said(ev.RequestSubmitted)) == 1


def test_an_attempt_that_breaks_off_goes_on_with_its_text() -> None:
    faults = [Failing(at_s=0.0, for_s=2.0, after_s=2.5)]
    ran = alone(conversation(Turn(6)), faults=faults, stream_s=100.0, instances=2)
    again = ran.said(act.Dispatch)[1][1]
    assert (again.response_tokens, again.computed_tokens) == (2, 6)
    assert ran.said(act.Answer)[0][0] == 1.0 + 2.5 + 4


class TestBesideBatches:
    trace = Trace("t", gather([conversation(Turn(3), group=f"g{i}") for i in range(4)]))

    def run(self, **traffic: Any) -> Watched:
        model = TrafficModel(rate=0.2, for_s=60.0, **traffic)
        return watch(STICKY, self.trace, make_scenario(traffic=model, train_s=1.0))

    def test_clients_are_answered_after_training(self) -> None:
        ran = self.run()
        asked = len(ran.said(ev.RequestSubmitted))
        assert asked == len(ran.said(act.Answer)) > 5
        assert ran.said(act.Answer)[-1][0] > ran.total_s == ran.deliveries[-1][0] + 1.0

    @pytest.mark.parametrize("colocated", [True, False])
    def test_a_trainer_that_is_done_gives_the_gpus_back(self, colocated: bool) -> None:
        scenario = make_scenario(
            colocated=colocated, train_s=1.0, traffic=TrafficModel(rate=0.2, for_s=60.0)
        )
        ran = watch(STICKY, self.trace, scenario)
        assert len(ran.said(ev.RequestSubmitted)) == len(ran.said(act.Answer))

    def test_the_same_seed_brings_the_same_clients(self) -> None:
        def asked(seed: int) -> Any:
            return self.run(seed=seed).said(ev.RequestSubmitted)

        assert asked(1) == asked(1) != asked(2)
