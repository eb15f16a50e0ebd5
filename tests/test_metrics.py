"""Metrics: journals short enough to work out every figure by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sched.core import actions as act
from rollout_sched.core import events as ev
from rollout_sched.core.model import Sample, Segment
from rollout_sched.metrics import CAUSES, Metrics, Summary
from tests.helpers import make_policy, make_scenario, make_trace, watch


class Tape:
    """A journal in the making: what happened when, and what was answered."""

    def __init__(self, places: float = 4, **options: Any) -> None:
        self.metrics = Metrics(places, **options)
        self.attempts = 0

    def at(self, now: float, event: ev.Event, *actions: act.Action) -> None:
        self.metrics.observe(now, event, actions)

    def join(self, *names: str, now: float = 0.0) -> None:
        for name in names:
            self.at(now, ev.InstanceJoined(name, 8, 1000))

    def dispatch(self, request: str, instance: str, *, computed: int = 0) -> act.Dispatch:
        self.attempts += 1
        return act.Dispatch(request, self.attempts, instance, 10, 100, 0, computed_tokens=computed)

    def start(self, now: float, *where: tuple[str, str]) -> None:
        """Dispatch (request, instance) pairs because of something that does not matter."""
        self.at(now, ev.Woke(), *(self.dispatch(*pair) for pair in where))

    def finish(self, now: float, request: str, attempt: int, tokens: int, *then: Any) -> None:
        self.at(now, ev.RequestFinished(request, attempt, tokens), *then)

    def idle(self, total_s: float) -> dict[str, Any]:
        return shares(self.metrics.summary(total_s).idle_bubble_by_cause)

    def vacant(self, total_s: float) -> dict[str, Any]:
        return shares(self.metrics.summary(total_s).occupancy_bubble_by_cause)


def shares(by_cause: dict[str, float]) -> dict[str, Any]:
    assert list(by_cause) == list(CAUSES)
    return {cause: pytest.approx(share) for cause, share in by_cause.items() if share}


def sample(
    request: str, tokens: int = 10, versions: Sequence[int] = (0,), staleness: int = 0
) -> Sample:
    group, _, index = request.rpartition("/")
    segments = tuple(Segment(v, tokens // len(versions), "i") for v in versions)
    return Sample(request, group, int(index), 10, tokens, segments, staleness, "stop")


def deliver(*samples: Sample, version: int = 0) -> act.Deliver:
    return act.Deliver(version, version, samples)


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


class TestTimes:
    def tape(self) -> Tape:
        """Ten requests start at 2 s and finish at 3, 4, ..., 12 s; the trainer asks at 1 s."""
        tape = Tape()
        tape.join("i")
        tape.at(1, ev.BatchRequested())
        tape.start(2, *[(f"a/{i}", "i") for i in range(10)])
        for number in range(9):
            tape.finish(3 + number, f"a/{number}", number + 1, 7)
        whole = deliver(*(sample(f"a/{i}", tokens=7) for i in range(10)))
        tape.finish(12, "a/9", 10, 7, whole)
        return tape

    def test_of_a_step(self) -> None:
        step = self.tape().metrics.steps[0]
        assert (step.t50_s, step.t90_s, step.t99_s) == (5.0, 9.0, 10.0)
        assert (step.start_s, step.end_s, step.rollout_s, step.span_s) == (0.0, 12.0, 10.0, 10.0)
        assert (step.samples, step.tokens, step.generated_tokens) == (10, 70, 70)

    def test_trainer_wait(self) -> None:
        tape = self.tape()
        tape.at(20, ev.WeightsPublished(1))
        tape.at(20, ev.BatchRequested())
        tape.start(21, ("b/0", "i"))
        tape.finish(25, "b/0", 11, 3, deliver(sample("b/0"), version=1))
        assert [step.trainer_wait_s for step in tape.metrics.steps] == [11.0, 5.0]
        assert tape.metrics.summary(30.0).trainer_wait_s == 16.0

    def test_a_batch_that_was_ready_was_not_waited_for(self) -> None:
        tape = self.tape()
        tape.start(13, ("b/0", "i"))
        tape.finish(15, "b/0", 11, 3)
        tape.at(20, ev.BatchRequested(), deliver(sample("b/0"), version=1))
        step = tape.metrics.steps[1]
        assert (step.trainer_wait_s, step.rollout_s, step.span_s) == (0.0, 2.0, 7.0)
        assert step.t99_s == 2.0

    def test_rates_are_over_the_whole_run(self) -> None:
        summary = self.tape().metrics.summary(20.0)
        assert summary.accepted_tokens_per_s == summary.tokens_per_s == 70 / 20
        assert summary.rollout_s == 10.0
        assert summary.steady_accepted_tokens_per_s is None

    def test_the_steady_rate_leaves_out_the_first_step_and_the_wind_down(self) -> None:
        tape = Tape()
        tape.join("i")
        for number, (begin, end) in enumerate([(0, 5), (6, 10), (11, 20)]):
            tape.start(begin, (f"g{number}/0", "i"))
            one = sample(f"g{number}/0", tokens=8)
            tape.finish(end, f"g{number}/0", number + 1, 8, deliver(one, version=number))
        assert tape.metrics.summary(30.0).steady_accepted_tokens_per_s == 16 / (20 - 5)


class TestTokens:
    def test_discarded_and_generated(self) -> None:
        tape = Tape()
        tape.join("i")
        tape.start(0, ("a/0", "i"), ("a/1", "i"))
        done = deliver(sample("a/0", tokens=9)), act.Discard("a/1", 0, "surplus", ends=True)
        tape.finish(5, "a/0", 1, 9, *done)
        late = ev.RequestInterrupted("a/1", 2, 6)
        tape.at(6, late, act.Discard("a/1", 6, "surplus"))
        summary = tape.metrics.summary(10.0)
        assert summary.discarded_tokens == 6
        assert summary.tokens_per_s == 1.5
        assert summary.accepted_tokens_per_s == 0.9

    def test_answers_nobody_waits_for_count_nothing(self) -> None:
        tape = Tape()
        tape.join("i")
        tape.start(0, ("a/0", "i"))
        for _ in range(3):
            tape.finish(5, "a/0", 1, 9)
        assert tape.metrics.summary(10.0).tokens_per_s == 0.9
        assert tape.idle(10.0) == {"barrier": 0.5}

    def test_resumed_attempts(self) -> None:
        tape = Tape()
        tape.join("i")
        tape.at(0, ev.Woke(), tape.dispatch("a/0", "i"), tape.dispatch("a/1", "i", computed=12))
        assert tape.metrics.summary(1.0).resumed_attempts == 1

    def test_counters_survive_the_death_of_their_instance(self) -> None:
        tape = Tape()
        tape.join("i", "j")
        tape.at(1, ev.InstanceReported("i", 0, 0, 0.0, preemptions=3, reprefilled_tokens=100))
        tape.at(2, ev.InstanceReported("i", 0, 0, 0.0, preemptions=5, reprefilled_tokens=170))
        tape.at(2, ev.InstanceReported("j", 0, 0, 0.0, preemptions=1, reprefilled_tokens=7))
        tape.at(3, ev.InstanceLost("i"))
        tape.join("i", now=4)  # and starts counting anew
        tape.at(5, ev.InstanceReported("i", 0, 0, 0.0, preemptions=2, reprefilled_tokens=20))
        summary = tape.metrics.summary(6.0)
        assert summary.preemptions == 5 + 2 + 1
        assert summary.reprefilled_tokens == 170 + 20 + 7

    def test_a_restart_nobody_noticed_keeps_them_too(self) -> None:
        tape = Tape()
        tape.join("i")
        tape.at(1, ev.InstanceReported("i", 0, 0, 0.0, preemptions=3))
        tape.join("i", now=4)
        assert tape.metrics.summary(6.0).preemptions == 3

    def test_what_an_instance_held_dies_with_it(self) -> None:
        tape = Tape()
        tape.join("i", "j")
        tape.start(0, ("a/0", "i"))
        tape.at(4, ev.InstanceLost("i"))
        tape.finish(8, "a/0", 1, 9)  # too late to be true
        assert tape.idle(10.0) == {"queue_empty": 4 / 14, "barrier": 6 / 14}

    def test_a_tool_may_outlive_the_instance_that_asked(self) -> None:
        tape = Tape()
        tape.join("i", "j")
        tape.start(0, ("a/0", "i"))
        tape.at(2, ev.TurnFinished("a/0", 1, 5))
        tape.at(4, ev.InstanceLost("i"))
        tape.at(6, ev.ToolReturned("a/0", 1, 3), tape.dispatch("a/0", "j", computed=15))
        tape.finish(10, "a/0", 2, 5)
        assert tape.idle(10.0) == {"tool_wait": 2 / 14, "queue_empty": 6 / 14}


class TestStaleness:
    def test_histogram_mean_and_worst(self) -> None:
        tape = Tape()
        tape.join("i")
        batch = [
            sample("a/0", 10, (3,), 0),
            sample("a/1", 10, (2, 3), 1),
            sample("b/0", 10, (1,), 2),
            sample("b/1", 10, (1,), 2),
        ]
        tape.at(1, ev.BatchRequested(), deliver(*batch, version=3))
        tape.at(2, ev.BatchRequested(), deliver(sample("c/0", 10, (0, 4), 4), version=4))
        summary = tape.metrics.summary(10.0)
        assert summary.staleness_histogram == {0: 1, 1: 1, 2: 2, 4: 1}
        assert summary.staleness_mean == 9 / 5
        assert summary.staleness_max == 4
        assert [step.max_staleness for step in tape.metrics.steps] == [2, 4]
        # Of the current version: all of a/0, half of a/1, half of c/0.
        assert summary.fresh_tokens_per_s == 2.0

    def test_the_oldest_prompt(self) -> None:
        """In deliveries since its first dispatch, however often it was set back."""
        tape = Tape()
        tape.join("i")
        tape.start(0, ("old/0", "i"))
        for number in range(3):
            tape.start(number, (f"g{number}/0", "i"))
            tape.at(number, ev.Woke(), deliver(sample(f"g{number}/0"), version=number))
        tape.start(3, ("old/0", "i"))
        tape.at(4, ev.Woke(), deliver(sample("old/0"), version=3))
        assert tape.metrics.summary(5.0).oldest_prompt_age_steps == 3


OFFERED = {"a": [10, 20], "b": [30, 40]}


class TestLengthBias:
    def bias(self, *batches: dict[str, list[int]]) -> Any:
        tape = Tape(offered=OFFERED.__getitem__)
        tape.join("i")
        for version, groups in enumerate(batches):
            samples = [
                sample(f"{group}/{i}", length)
                for group, lengths in groups.items()
                for i, length in enumerate(lengths)
            ]
            tape.at(version, ev.BatchRequested(), deliver(*samples, version=version))
        return tape.metrics.summary(10.0).length_bias

    def test_none_if_all_that_was_offered_is_trained(self) -> None:
        bias = self.bias({"a": [20, 10], "b": [30, 40]})
        assert (bias.mean_ratio, bias.ks, bias.step_ks, bias.group_ratio) == (1, 0, 0, 1)

    def test_short_first_shows_in_the_steps_alone(self) -> None:
        bias = self.bias({"a": [10, 20]}, {"b": [30, 40]})
        assert (bias.mean_ratio, bias.ks, bias.group_ratio) == (1, 0, 1)
        assert bias.step_ks == 0.5

    def test_the_shortest_of_each_group(self) -> None:
        bias = self.bias({"a": [10, 10], "b": [30, 30]})
        assert bias.mean_ratio == 20 / 25
        assert bias.group_ratio == pytest.approx((10 / 15 + 30 / 35) / 2)
        assert bias.ks == 0.25

    def test_nothing_offered_is_no_bias(self) -> None:
        bias = Tape().metrics.summary(1.0).length_bias
        assert (bias.mean_ratio, bias.ks, bias.step_ks, bias.group_ratio) == (1, 0, 0, 1)

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    @settings(max_examples=50, deadline=None)
    @given(
        offered=st.lists(st.integers(1, 30), min_size=1, max_size=20),
        trained=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    )
    def test_ks_is_scipy_s(self, offered: list[int], trained: list[int]) -> None:
        stats = pytest.importorskip("scipy.stats")
        tape = Tape(offered=lambda group: offered)
        tape.join("i")
        batch = deliver(*(sample(f"a/{i}", length) for i, length in enumerate(trained)))
        tape.at(0, ev.BatchRequested(), batch)
        expected = stats.ks_2samp(trained, offered, method="asymp").statistic
        assert tape.metrics.summary(1.0).length_bias.ks == pytest.approx(expected)


def test_steps_add_up_to_the_whole() -> None:
    tape = Tape(places=4)
    tape.join("i", "j")
    for number in range(4):
        tape.start(number * 10, (f"g{number}/0", "i"))
        one = deliver(sample(f"g{number}/0"), version=number)
        tape.finish(number * 10 + 6, f"g{number}/0", number + 1, 5, one)
    summary = tape.metrics.summary(36.0)
    steps = tape.metrics.steps
    assert sum(step.capacity_s for step in steps) == 2 * 36
    assert sum(step.idle_bubble * step.capacity_s for step in steps) == pytest.approx(
        summary.idle_bubble * 72
    )
    assert sum(step.occupancy_bubble * step.capacity_s for step in steps) == pytest.approx(
        summary.occupancy_bubble * 72
    )


def consistent(summary: Summary) -> None:
    assert 0 <= summary.idle_bubble <= 1 + 1e-9
    assert summary.idle_bubble <= summary.occupancy_bubble + 1e-9 <= 1 + 2e-9
    assert sum(summary.idle_bubble_by_cause.values()) == pytest.approx(summary.idle_bubble)
    assert sum(summary.occupancy_bubble_by_cause.values()) == pytest.approx(
        summary.occupancy_bubble
    )
    assert all(
        summary.idle_bubble_by_cause[cause] <= summary.occupancy_bubble_by_cause[cause] + 1e-9
        for cause in ("weight_update", "barrier")
    )


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 25), min_size=2, max_size=2), min_size=1, max_size=6),
    places=st.sampled_from([1, 3, 8]),
    colocated=st.booleans(),
    at_update=st.sampled_from(["drain", "in_place", "resubmit"]),
    kv_tokens=st.sampled_from([32, 10_000]),
)
def test_idle_never_exceeds_occupancy_nor_occupancy_the_fleet(
    lengths: list[list[int]], places: int, colocated: bool, at_update: str, kv_tokens: int
) -> None:
    policy = make_policy(
        "async",
        batching="fully_async",
        admission="unbounded",
        freshness={"max_staleness": 2},
        interruption={"use": "partial", "at_update": at_update},
    )
    trace = make_trace({f"g{i}": members for i, members in enumerate(lengths)})
    scenario = make_scenario(
        instances=2, slots=3, kv_tokens=kv_tokens, colocated=colocated, poll_s=2.0, train_s=3.0
    )
    ran = watch(policy, trace, scenario, check=False)
    metrics = Metrics(places, colocated=colocated)
    for now, event, actions in ran.log:
        metrics.observe(now, event, actions)
    summary = metrics.summary(ran.total_s)
    consistent(summary)
    for step in metrics.steps:
        assert step.idle_bubble <= step.occupancy_bubble + 1e-9 <= 1 + 2e-9
    assert sum(step.capacity_s for step in metrics.steps) <= 2 * ran.total_s + 1e-9
