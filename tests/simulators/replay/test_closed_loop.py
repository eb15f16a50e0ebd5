"""The closed loop on worlds small enough to follow by hand: one engine step takes one second."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import msgspec
import pytest

from rollout_sched.config import shipped
from rollout_sched.core.errors import CallerError, PolicyError
from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.roles import FleetView, Instance, Request, Routing
from rollout_sched.simulators.replay.closed_loop import ClosedLoop
from rollout_sched.simulators.replay.faults import (
    Failing,
    Leaving,
    Lost,
    SchedulerRestarts,
    ToolsFailing,
)
from rollout_sched.simulators.replay.scenario import RewardModel, TrafficModel
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn, gather
from tests.helpers import Watched, make_policy, make_scenario, make_trace, watch

SYNC = make_policy("sync", weights={"when": "between_batches"})


def trajectories(*turns: tuple[Turn, ...]) -> Trace:
    """Groups of one sample each, all of 4 prompt tokens."""
    return Trace("t", gather([SampleRecord(f"g{i}", 0, 4, each) for i, each in enumerate(turns)]))


def segments(ran: Watched, group: str) -> list[tuple[int, int]]:
    """(version, tokens) of the only sample of a group."""
    (sample,) = (sample for sample in ran.samples if sample.group == group)
    return [(segment.version, segment.tokens) for segment in sample.segments]


class TestSync:
    def test_generate_train_update_generate(self) -> None:
        ran = watch(SYNC, make_trace({"a": [3, 5], "b": [2, 4]}), make_scenario())
        # 5 s for a, 10 s of training, 2 s of update, 4 s for b, 10 s of training.
        assert ran.deliveries == [(5.0, ["a"]), (21.0, ["b"])]
        assert ran.total_s == 31.0
        assert [sample.staleness for sample in ran.samples] == [0, 0, 0, 0]
        assert segments(ran_alone(), "a") == [(0, 3)]

    def test_slots_make_requests_wait_their_turn(self) -> None:
        ran = watch(SYNC, make_trace({"a": [3, 5, 2]}), make_scenario(slots=2))
        assert ran.dispatches == [(0.0, "a/0"), (0.0, "a/1"), (3.0, "a/2")]
        assert ran.deliveries == [(5.0, ["a"])]

    def test_two_instances_share_the_work(self) -> None:
        ran = watch(SYNC, make_trace({"a": [3, 5]}), make_scenario(instances=2, slots=1))
        assert [action.instance for _, action in ran.said(act.Dispatch)] == [
            "instance-0",
            "instance-1",
        ]

    def test_the_last_batch_may_be_short(self) -> None:
        trace = make_trace({"a": [3], "b": [3], "c": [3]})
        ran = watch(SYNC, trace, make_scenario(prompts_per_step=2))
        assert [groups for _, groups in ran.deliveries] == [["a", "b"], ["c"]]

    def test_arrivals_are_waited_for(self) -> None:
        samples = [
            SampleRecord("a", 0, 4, (Turn(2),), 1.5),
            SampleRecord("b", 0, 4, (Turn(2),), 40.0),
        ]
        ran = watch(SYNC, Trace("t", gather(samples)), make_scenario())
        assert ran.said(ev.GroupSubmitted)[0][0] == 1.5
        assert ran.deliveries == [(3.5, ["a"]), (42.0, ["b"])]
        assert ran.said(ev.SubmissionsClosed)[0][0] == 40.0


def ran_alone() -> Watched:
    return watch(SYNC, make_trace({"a": [3]}), make_scenario())


def test_one_step_off_overlaps_a_batch_with_the_training_of_the_last() -> None:
    policy = make_policy(
        "off",
        batching="one_step_off",
        freshness={"max_staleness": 1},
        weights={"when": "between_batches"},
    )
    trace = make_trace({"a": [5], "b": [4], "c": [3]})
    ran = watch(policy, trace, make_scenario())
    # b is made at 5-9 while a trains (5-15); c after the update (15-17), while b trains (15-25).
    assert ran.dispatches == [(0.0, "a/0"), (5.0, "b/0"), (17.0, "c/0")]
    assert ran.deliveries == [(5.0, ["a"]), (15.0, ["b"]), (25.0, ["c"])]
    assert [sample.staleness for sample in ran.samples] == [0, 1, 1]
    assert ran.total_s == 35.0


class TestTailBatching:
    policy = make_policy(
        "tail",
        batching={"use": "tail_batching", "over_prompts": 2.0, "over_samples": 1.5},
        weights={"when": "between_batches"},
    )
    trace = make_trace(
        {"a": [2, 2], "b": [9, 9], "c": [8, 8], "d": [3, 3], "e": [4, 4], "f": [5, 5], "g": [7, 7]}
    )

    def test_a_short_round_sets_the_tail_back_and_a_long_round_collects_it(self) -> None:
        ran = watch(self.policy, self.trace, make_scenario(slots=99, prompts_per_step=2))
        # Short: four prompts of three samples, done when two are whole. Long: two of two. Then
        # only three are left for a short round, and its tail ends in a long round of its own.
        rounds = [(3.0, ["a", "d"]), (24.0, ["b", "c"]), (41.0, ["e", "f"]), (60.0, ["g"])]
        assert ran.deliveries == rounds
        assert Counter(now for now, _ in ran.dispatches) == {0.0: 12, 15.0: 4, 36.0: 9, 53.0: 2}

    def test_the_tail_starts_over_and_is_counted_as_thrown_away(self) -> None:
        ran = watch(self.policy, self.trace, make_scenario(slots=99, prompts_per_step=2))
        thrown = dict.fromkeys(("deferred", "surplus"), 0)
        for _, action in ran.said(act.Discard):
            thrown[action.reason] += action.tokens
        # When a round ends, three samples each of b and c have made 3 tokens, of g 5. An interrupt
        # at the end of a step loses none.
        assert thrown["deferred"] == 2 * 3 * 3 + 3 * 5
        # The third sample of a, d, e and f is whole in the very step of the second.
        assert thrown["surplus"] == 2 + 3 + 4 + 5
        assert {sample.staleness for sample in ran.samples} == {0}


class TestFullyAsync:
    trace = make_trace({"a": [3], "b": [20]})

    def run(self, **interruption: Any) -> Watched:
        policy = make_policy(
            "async",
            batching="fully_async",
            freshness={"max_staleness": 2},
            interruption={"use": "partial", **interruption},
        )
        return watch(policy, self.trace, make_scenario(train_s=4.0, poll_s=1.0))

    def reprefilled(self, ran: Watched) -> int:
        return int(ran.said(ev.InstanceReported)[-1][1].reprefilled_tokens)

    def test_retain_freezes_requests_and_goes_on_from_their_kv(self) -> None:
        ran = self.run(kv="retain", at_update="in_place")
        # a trains at 3-7; the pause waits for the end of its step, the update takes 2 s.
        pause = ran.said(act.Pause)[0][1]
        assert (pause.mode, pause.clear_cache) == ("keep", False)
        assert segments(ran, "b") == [(0, 7), (1, 13)]
        assert len(ran.dispatches) == 2
        assert ran.deliveries == [(3.0, ["a"]), (22.0, ["b"])]
        assert self.reprefilled(ran) == 0

    def test_recompute_brings_requests_back_and_prefills_them_again(self) -> None:
        ran = self.run(kv="recompute", at_update="resubmit")
        assert [request for _, request in ran.dispatches] == ["a/0", "b/0", "b/0"]
        versions = [version for version, _ in segments(ran, "b")]
        assert versions == [0, 1]
        assert sum(tokens for _, tokens in segments(ran, "b")) == 20
        # All it had made and its prompt of 4, but the newest token, whose KV was never written.
        made = segments(ran, "b")[0][1]
        again = ran.said(act.Dispatch)[2][1]
        assert again.context_tokens == again.computed_tokens == 4 + made
        assert self.reprefilled(ran) == 4 + made

    def test_drain_lets_requests_finish_under_the_old_weights(self) -> None:
        ran = self.run(at_update="drain")
        assert segments(ran, "b") == [(0, 20)]
        assert ran.samples[-1].staleness == 1


def test_partial_rollout_spends_a_budget_of_tokens_a_step() -> None:
    policy = make_policy(
        "partial",
        batching={"use": "sync", "over_prompts": 2.0},
        freshness={"max_staleness": 9},
        interruption={"use": "partial", "segment_tokens": 3},
        weights={"when": "between_batches"},
        ordering="resumed_first",
    )
    trace = make_trace({"long": [8], "b": [2], "c": [3], "d": [1]})
    ran = watch(policy, trace, make_scenario(train_s=4.0))
    # Stopped by b at 2 s, at its budget at 11 s, by d at 18 s; 4 s of training, 2 s of update.
    assert segments(ran, "long") == [(0, 2), (1, 3), (2, 1), (3, 2)]
    assert [now for now, request in ran.dispatches if request == "long/0"] == [0, 8, 17, 24]
    assert ran.deliveries == [(2, ["b"]), (11, ["c"]), (18, ["d"]), (26, ["long"])]
    assert {action.max_new_tokens for _, action in ran.said(act.Dispatch)} == {2, 3}
    assert ran.samples[-1].staleness == 3


class TestTrajectories:
    def test_turns_wait_for_their_tools(self) -> None:
        ran = watch(SYNC, trajectories((Turn(3, 10, 2.5), Turn(2))), make_scenario())
        assert ran.dispatches == [(0.0, "g0/0"), (5.5, "g0/0")]
        assert ran.deliveries == [(7.5, ["g0"])]
        second = ran.said(act.Dispatch)[1][1]
        assert (second.context_tokens, second.turn) == (4 + 3 + 10, 1)
        assert second.computed_tokens == 4 + 3  # the observation is new to every instance
        assert [segment.tokens for segment in ran.samples[0].segments] == [3, 2]

    def test_the_next_turn_finds_its_context_in_the_cache(self) -> None:
        ran = watch(SYNC, trajectories((Turn(3, 10, 2.5), Turn(2))), make_scenario())
        report = ran.said(ev.InstanceReported)[-1][1]
        # The prompt and the answer, but for its last token, whose KV was never written.
        assert report.cached_tokens == 4 + 3 - 1
        assert (report.prefill_tokens, report.reprefilled_tokens) == (4 + 1 + 10, 1)

    def test_a_tool_without_time_or_answer_is_a_turn_too(self) -> None:
        ran = watch(SYNC, trajectories((Turn(1), Turn(1), Turn(1))), make_scenario())
        assert len(ran.said(ev.TurnFinished)) == 2
        assert ran.deliveries == [(3.0, ["g0"])]

    def test_the_cap_ends_a_trajectory_within_a_turn(self) -> None:
        trace = trajectories((Turn(3, 1, 1.0), Turn(9, 1, 1.0), Turn(5)))
        ran = watch(SYNC, trace, make_scenario(max_tokens=7))
        assert (ran.samples[0].response_tokens, ran.samples[0].finish) == (7, "length")

    def test_the_cap_ends_a_trajectory_between_turns(self) -> None:
        trace = trajectories((Turn(3, 1, 1.0), Turn(4, 1, 1.0), Turn(5)))
        ran = watch(SYNC, trace, make_scenario(max_tokens=7))
        assert (ran.samples[0].response_tokens, ran.samples[0].finish) == (7, "length")

    def test_an_interrupted_turn_goes_on_where_it_was(self) -> None:
        policy = make_policy(
            "async",
            batching="fully_async",
            freshness={"max_staleness": 3},
            interruption={"use": "partial", "at_update": "resubmit"},
        )
        trace = trajectories((Turn(2),), (Turn(3, 5, 1.0), Turn(9, 2, 1.0), Turn(3)))
        ran = watch(policy, trace, make_scenario(train_s=5.0))
        turns = [action.turn for _, action in ran.said(act.Dispatch) if action.request == "g1/0"]
        assert turns == [0, 1, 1, 2]
        assert ran.samples[-1].response_tokens == 15


class TestPlacement:
    policy = make_policy("async", batching="fully_async", freshness={"max_staleness": 5})
    trace = make_trace({"a": [2], "b": [8]})

    def finished(self, **scenario: Any) -> float:
        ran = watch(self.policy, self.trace, make_scenario(**scenario))
        return ran.said(ev.RequestFinished)[1][0]

    def test_disaggregated_training_leaves_generation_alone(self) -> None:
        assert self.finished(train_s=10.0) == 8.0

    def test_colocated_training_stops_generation(self) -> None:
        """From the end of the step under way at 2 s until training is over at 12 s."""
        assert self.finished(train_s=10.0, colocated=True, keeps_kv=True) == pytest.approx(18.0)

    def test_colocated_training_waits_for_the_last_instance_to_stop(self) -> None:
        samples = [SampleRecord("a", 0, 4, (Turn(3),)), SampleRecord("b", 0, 4, (Turn(9),), 0.5)]
        trace = Trace("t", gather(samples))
        ran = watch(self.policy, trace, make_scenario(instances=2, train_s=10.0, colocated=True))
        # a is delivered at 3 s, while the other instance is in a step that ends at 3.5 s.
        assert ran.deliveries[0][0] == 3.0
        assert ran.said(ev.WeightsPublished)[0][0] == pytest.approx(13.5)

    def test_colocated_training_costs_the_kv_unless_kept(self) -> None:
        def reprefilled(keeps_kv: bool) -> int:
            scenario = make_scenario(colocated=True, keeps_kv=keeps_kv, poll_s=1.0)
            ran = watch(self.policy, self.trace, scenario)
            return int(ran.said(ev.InstanceReported)[-1][1].reprefilled_tokens)

        assert reprefilled(True) == 0
        assert reprefilled(False) > 0


class TestFusion:
    """Training takes a second a token on all GPUs, and ten a step; a group has 4 prompt tokens."""

    policy = make_policy(
        "fusion",
        batching={"use": "sync", "part_prompts": 1},
        lending={"use": "stage_fusion", "whole": 0.3, "slowdown": 9.0},
        weights={"when": "between_batches"},
    )

    def run(self, trace: Trace, *faults: Any, prompts: int = 2, policy: Any = None) -> Watched:
        scenario = make_scenario(
            instances=2, colocated=True, prompts_per_step=prompts, faults=faults
        )
        trainer = msgspec.structs.replace(scenario.trainer, seconds_per_token=1.0)
        scenario = msgspec.structs.replace(scenario, trainer=trainer)
        return watch(policy or self.policy, trace, scenario)

    def test_half_of_the_gpus_train_at_half_the_speed(self) -> None:
        """a's 6 s take 12 s on one instance while b is made on the other; then 24 s are left."""
        ran = self.run(make_trace({"a": [2], "b": [20], "c": [1]}))
        assert ran.said(act.Lend) == [(2.0, act.Lend("instance-0"))]
        assert ran.said(ev.InstanceReturned)[0][0] == pytest.approx(20.0 + 24.0 + 10.0)
        assert ran.said(ev.WeightsPublished)[0][0] == pytest.approx(54.0)

    def test_the_rest_is_trained_on_all_gpus(self) -> None:
        """4 of a's 6 s are done when b is."""
        ran = self.run(make_trace({"a": [2], "b": [10], "c": [1]}))
        assert ran.said(ev.WeightsPublished)[0][0] == pytest.approx(10.0 + 2.0 + 14.0 + 10.0)

    def test_displaced_requests_resume_elsewhere_on_policy(self) -> None:
        ran = self.run(make_trace({"a": [2], "b": [20], "c": [30]}), prompts=3)
        (interrupted,) = ran.said(act.Interrupt)
        assert interrupted[1].request == "c/0"
        sample = next(sample for sample in ran.samples if sample.group == "c")
        assert [segment.instance for segment in sample.segments] == ["instance-0", "instance-1"]
        assert sum(segment.tokens for segment in sample.segments) == 30
        assert all(sample.staleness == 0 for sample in ran.samples)

    def test_lent_instances_serve_in_the_next_step(self) -> None:
        ran = self.run(make_trace({"a": [2], "b": [20], "c": [5], "d": [5]}))
        second = [action.instance for now, action in ran.said(act.Dispatch) if now > 50.0]
        assert sorted(second) == ["instance-0", "instance-1"]

    def test_the_last_lent_instance_is_returned(self) -> None:
        """The trainer keeps what it has trained by then."""
        lost = Lost(at_s=7.5, instance=1)
        ran = self.run(make_trace({"a": [2], "b": [20], "c": [1]}), lost)
        assert ran.said(act.Reclaim) == [(7.5, act.Reclaim("instance-0"))]
        assert ran.said(ev.InstanceReturned)[0][0] == 7.5
        # b begins anew; 5.5 s on half of the GPUs, which were all that was left, trained a while.
        assert ran.deliveries[-2][0] == pytest.approx(27.5)

    def test_an_instance_lost_while_lent_is_not_returned(self) -> None:
        lost = Lost(at_s=7.5, instance=0, returns_after_s=1.0)
        ran = self.run(make_trace({"a": [2], "b": [20], "c": [1]}), lost)
        assert not ran.said(ev.InstanceReturned)
        # a was trained for 5.5 s at half the speed.
        assert ran.said(ev.WeightsPublished)[0][0] == pytest.approx(20.0 + 3.25 + 24.0 + 10.0)


class Nowhere(Routing, msgspec.Struct, frozen=True):
    """A routing that never decides."""

    def load(self, instance: Instance) -> int:
        return 0

    def choose(self, request: Request, fleet: FleetView) -> Instance | None:
        return None


@pytest.mark.parametrize("poll_s", [0.0, 1.0])
def test_a_stalled_policy_is_reported_with_its_place(poll_s: float) -> None:
    """Polls alone do not keep a run alive."""
    policy = SYNC
    scenario = make_scenario(poll_s=poll_s)
    workload = Workload(make_trace({"a": [3], "b": [3]}), scenario.job)
    roles = msgspec.structs.replace(policy.build(), routing=Nowhere())
    scheduler = policy.scheduler(1)
    scheduler = type(scheduler)(roles, 1)
    with pytest.raises(PolicyError, match=r"is left at 0\.000 s, with 0 of 2 groups trained"):
        ClosedLoop(scheduler, workload, scenario).run()


def test_an_oversized_request_is_refused_at_start() -> None:
    scenario = make_scenario(kv_tokens=50)
    workload = Workload(make_trace({"a": [60]}), scenario.job)
    with pytest.raises(CallerError, match="group 'a' may need 64 tokens"):
        ClosedLoop(SYNC.scheduler(1), workload, scenario)


class TestVisibility:
    trace = make_trace({"a": [5], "b": [5]})

    def test_polls_come_at_their_interval_while_there_is_work_and_at_the_end(self) -> None:
        ran = watch(SYNC, self.trace, make_scenario(poll_s=2.5))
        polls = {now for now, _ in ran.said(ev.InstanceReported)}
        # Two answers of 5 s, each followed by 10 s of training; 2 s of loading between them.
        assert sorted(polls) == [2.5, 5.0, 17.5, 20.0, 22.5, 32.0]

    def test_idle_time_costs_nothing(self) -> None:
        late = SampleRecord("b", 0, 4, (Turn(5),), arrival_s=1e8)
        trace = Trace("t", gather([SampleRecord("a", 0, 4, (Turn(5),)), late]))
        ran = watch(SYNC, trace, make_scenario(poll_s=2.5, stream_s=1.0))
        assert ran.total_s > 1e8
        assert len(ran.said(ev.InstanceReported)) < 10

    def test_no_polls_while_colocated_training_has_the_gpus(self) -> None:
        ran = watch(SYNC, self.trace, make_scenario(poll_s=1.0, colocated=True))
        assert [now for now, _ in ran.said(ev.InstanceReported) if 5.0 < now < 15.0] == []
        assert [now for now, _ in ran.said(ev.InstanceReported) if 15.0 < now < 22.0]

    def test_no_polls_while_paused_for_an_update(self) -> None:
        policy = make_policy(
            "async",
            batching="fully_async",
            freshness={"max_staleness": 2},
            interruption={"use": "partial", "kv": "retain", "at_update": "in_place"},
        )
        trace = make_trace({"a": [3], "b": [30]})
        ran = watch(policy, trace, make_scenario(train_s=4.2, update_s=3.0, poll_s=0.5))
        begin, end = ran.said(act.Pause)[0][0], ran.said(act.Resume)[0][0]
        assert end - begin >= 3.0
        polls = [now for now, _ in ran.said(ev.InstanceReported)]
        assert not [now for now in polls if begin < now < end]
        assert [now for now in polls if now > end]

    def test_polls_off_leaves_only_the_last(self) -> None:
        ran = watch(SYNC, self.trace, make_scenario(poll_s=0.0))
        assert [now for now, _ in ran.said(ev.InstanceReported)] == [ran.total_s]

    def test_a_poll_counts_generated_tokens(self) -> None:
        ran = watch(SYNC, make_trace({"a": [5, 3]}), make_scenario(poll_s=2.5))
        _, report = ran.said(ev.InstanceReported)[0]
        assert (report.running, report.waiting, report.generated_tokens) == (2, 0, 4)

    def test_nothing_streams_unless_asked(self) -> None:
        assert not watch(SYNC, self.trace, make_scenario()).said(ev.TokensArrived)

    def test_a_stream_tells_whole_tokens_so_far(self) -> None:
        ran = watch(SYNC, make_trace({"a": [5]}), make_scenario(stream_s=1.5))
        arrived = [(now, event.tokens) for now, event in ran.said(ev.TokensArrived)]
        assert arrived == [(1.5, 1), (3.0, 3), (4.5, 4)]


def test_predictions_learn_from_streams() -> None:
    """Half of the group is known to be longer than 3, so the cap is all that can be expected."""
    prediction = {"use": "group_history", "method": "censored", "quantile": 0.6}
    policy = make_policy("p", prediction=prediction, routing={"use": "least_tokens"})
    ran = watch(policy, make_trace({"a": [3, 50]}), make_scenario(stream_s=20.0))
    scheduler, expected = policy.scheduler(1), []
    for now, event, _ in ran.log:
        scheduler.handle(event, now)
        if now in (3.0, 20.0, 40.0):
            expected.append(scheduler.parts.requests["a/1"].expected_tokens)
    assert expected == [3, 50, 50]


class TestRestarts:
    def test_a_restart_keeps_streamed_tokens(self) -> None:
        restart = [SchedulerRestarts(at_s=4.0)]
        trace = make_trace({"a": [3, 9]})
        ran = watch(SYNC, trace, make_scenario(faults=restart))
        assert ran.deliveries == [(13.0, ["a"])]
        streamed = watch(SYNC, trace, make_scenario(faults=restart, stream_s=1.0))
        assert streamed.deliveries == [(9.0, ["a"])]
        assert [[s.tokens for s in sample.segments] for sample in streamed.samples] == [[3], [4, 5]]

    def test_a_restart_does_not_disturb_training(self) -> None:
        trace = make_trace({"a": [3, 5], "b": [2, 4]})
        ran = watch(SYNC, trace, make_scenario(faults=[SchedulerRestarts(at_s=8.0)]))
        assert ran.deliveries == [(5.0, ["a"]), (21.0, ["b"])]

    def test_a_restart_repeats_an_update_in_progress(self) -> None:
        trace = make_trace({"a": [3, 5], "b": [2, 4]})
        ran = watch(SYNC, trace, make_scenario(faults=[SchedulerRestarts(at_s=16.0)]))
        assert ran.deliveries == [(5.0, ["a"]), (22.0, ["b"])]
        assert [sample.staleness for sample in ran.samples] == [0, 0, 0, 0]

    @pytest.mark.parametrize("at_s", [5.2, 6.0, 8.0, 12.0, 16.0, 17.5])
    def test_a_paused_fleet_resumes_after_a_restart(self, at_s: float) -> None:
        policy = make_policy(
            "async",
            batching="fully_async",
            freshness={"max_staleness": 2},
            interruption={"use": "partial", "at_update": "in_place"},
        )
        trace = make_trace({name: [4, 20] for name in "abcd"})
        scenario = make_scenario(instances=2, update_s=5.0, faults=[SchedulerRestarts(at_s=at_s)])
        ran = watch(policy, trace, scenario)
        assert sorted(group for _, groups in ran.deliveries for group in groups) == list("abcd")
        assert ran.loop.anomalies == {}

    def test_a_tool_continues_through_a_restart(self) -> None:
        trace = trajectories((Turn(3, 2, 6.0), Turn(4)))
        ran = watch(SYNC, trace, make_scenario(faults=[SchedulerRestarts(at_s=5.0)]))
        assert ran.deliveries == [(13.0, ["g0"])]

    def test_clients_ask_again(self) -> None:
        traffic = TrafficModel(rate=0.2, for_s=40.0)
        faults = [SchedulerRestarts(at_s=at_s) for at_s in (10.0, 20.0, 30.0)]
        trace = make_trace({"a": [9], "b": [7]})
        ran = watch(SYNC, trace, make_scenario(batches=False, traffic=traffic, faults=faults))
        answered = [action.sample.request for _, action in ran.said(act.Answer)]
        asked = [event.request for _, event in ran.said(ev.RequestSubmitted)]
        assert set(answered) < set(asked)
        assert len(answered) == len(ran.loop._clients._traffic or ())

    def test_no_attempt_outlives_the_scheduler_that_dispatched_it(self) -> None:
        """As the second one dies, an interrupted attempt ends on the second instance, and goes on
        on the first."""
        policy = make_policy("m", migration={"use": "tests.helpers:Restless", "interval_s": 3.0})
        faults = [SchedulerRestarts(at_s=1.0), SchedulerRestarts(at_s=1.0)]
        scenario = make_scenario(instances=2, slots=2, prompts_per_step=1, faults=faults)
        ran = watch(policy, make_trace({"a": [5, 5]}), scenario)
        log = [word for _, event, actions in ran.log for word in (event, *actions)]
        assert sum(isinstance(word, ev.Restored) for word in log) == 2
        last = max(at for at, word in enumerate(log) if isinstance(word, ev.Restored))
        before, after = log[:last], log[last:]
        dead = {word.attempt for word in before if isinstance(word, act.Dispatch)}
        assert not [word for word in after if getattr(word, "attempt", 0) in dead]
        assert ran.loop.anomalies == {}

    def test_conversation_that_ends_after_a_restart_is_unknown(self) -> None:
        """The client has an answer, asks again, and gives up before the next scheduler, which knows
        no earlier conversations, could send its request anywhere."""
        trace = trajectories((Turn(5, 1, 3.0), Turn(60)))
        traffic = TrafficModel(rate=0.3, for_s=60.0, patience_s=40.0)
        for faults, anomalies in ([], {}), ([SchedulerRestarts(at_s=11.0)], {"unknown_session": 1}):
            scenario = make_scenario(slots=1, prompts_per_step=1, traffic=traffic, faults=faults)
            assert watch(SYNC, trace, scenario).loop.anomalies == anomalies

    def test_a_draining_instance_leaves_after_a_restart(self) -> None:
        faults = [Leaving(at_s=2.0, instance=1), SchedulerRestarts(at_s=3.0)]
        trace = make_trace({"a": [9, 9], "b": [3, 3]})
        ran = watch(SYNC, trace, make_scenario(instances=2, faults=faults))
        assert [now for now, _ in ran.said(ev.InstanceLost)] == [3.0]

    def test_a_lent_instance_serves_after_a_restart(self) -> None:
        policy = make_policy("fusion", lending="tests.helpers:Generous", freshness={})
        trace = make_trace({name: [4, 20] for name in "abcd"})
        faults = [SchedulerRestarts(at_s=at_s) for at_s in (0.5, 6.0, 9.0, 21.0)]
        scenario = make_scenario(instances=3, colocated=True, prompts_per_step=2, faults=faults)
        ran = watch(policy, trace, scenario)
        assert ran.said(act.Lend)
        assert sorted(group for _, groups in ran.deliveries for group in groups) == list("abcd")

    @pytest.mark.parametrize("name", shipped("policies/presets"))
    def test_every_preset_finishes_whatever_dies_when(self, name: str) -> None:
        """Its books are checked after each event."""
        faults = [SchedulerRestarts(at_s=at_s) for at_s in (3.0, 17.5, 40.2, 77.7, 120.0, 121.0)]
        lengths = {f"g{g}": [3 + 7 * (g * 5 + s) % 53 for s in range(3)] for g in range(12)}
        scenario = make_scenario(
            instances=3, slots=4, prompts_per_step=3, stream_s=2.0, poll_s=5.0, faults=faults
        )
        ran = watch(name, make_trace(lengths), scenario)
        assert max(Counter(sample.request for sample in ran.samples).values()) == 1
        assert Counter(s.group for s in ran.samples) == {f"g{g}": 3 for g in range(12)}
        assert ran.loop.anomalies == {}


def test_every_event_can_come_to_pass() -> None:
    """All that the scheduler knows of, in one run; but no recorded tool ends a trajectory."""
    policy = make_policy(
        "all", batching="fully_async", freshness={"max_staleness": 3}, interruption="partial"
    )
    samples = [
        SampleRecord(
            f"g{i}", 0, 4, (Turn(3 + i, 2, 1.5), Turn(9 + i)) if i % 2 else (Turn(20 + i),)
        )
        for i in range(6)
    ]
    faults = (
        Lost(at_s=9.3, instance=0, returns_after_s=4.0),
        Leaving(at_s=20.1, instance=1, returns_after_s=4.0),
        Failing(at_s=30.0, for_s=9.0, share=0.5, after_s=1.5, blame="instance"),
        ToolsFailing(at_s=5.0, share=0.4),
        SchedulerRestarts(at_s=41.0),
    )
    scenario = make_scenario(
        instances=3,
        train_s=4.0,
        poll_s=5.0,
        stream_s=3.0,
        traffic=TrafficModel(rate=0.3, for_s=60.0, patience_s=15.0),
        rewards=RewardModel(seconds=3.0, spread=0.5, filtered=0.3),
        faults=faults,
    )
    ran = watch(policy, Trace("t", gather(samples)), scenario)
    only_on_shared_gpus = {ev.InstanceReturned}
    where_others_load_weights = {ev.GateClosed, ev.GateOpened}
    by_others_than_the_client = {ev.RequestAborted}
    elsewhere = only_on_shared_gpus | where_others_load_weights | by_others_than_the_client
    assert ran.kinds == set(get_args(ev.Event)) - elsewhere
    assert len(ran.kinds) == 23
    assert not ran.loop.anomalies


POLICY = make_policy("sync")


def test_a_removed_instance_is_not_polled() -> None:
    scenario = make_scenario(instances=2, poll_s=2.0, faults=[Lost(at_s=3.0, instance=1)])
    ran = watch(POLICY, make_trace({"a": [7]}), scenario)
    polls = [now for now, event in ran.said(ev.InstanceReported) if event.instance == "instance-1"]
    assert polls == [2.0]


def test_a_failed_attempt_sends_no_events() -> None:
    """It fails within a step; the stream is read before the instance has got rid of it."""
    faults = [Failing(at_s=0.0, for_s=1.0, after_s=2.4)]
    ran = watch(POLICY, make_trace({"a": [7]}), make_scenario(stream_s=2.5, faults=faults))
    heard = [(now, event.attempt) for now, event in ran.said(ev.TokensArrived)]
    assert (2.4, 1) in heard
    assert not [attempt for now, attempt in heard if attempt == 1 and now > 2.4]
    assert not ran.scheduler.state.anomalies
