"""One step: its bubbles are shares of its instance-seconds."""

from __future__ import annotations

import pytest

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Dispatch
from rollout_sched.metrics import Step
from rollout_sched.metrics.steps import STALENESS, Trained
from tests.metrics.tape import Tape, deliver, sample
from tests.metrics.told import sample as sample_trained
from tests.metrics.told import tell


def test_bubbles_are_shares_of_the_instance_seconds() -> None:
    idle, vacant = {"barrier": 10.0, "queue_empty": 10.0}, {"barrier": 10.0, "kv_stall": 30.0}
    step = Step(0, 0.0, capacity_s=80.0, idle_s=idle, vacant_s=vacant)
    assert step.idle_bubble == pytest.approx(0.25)
    assert step.occupancy_bubble == pytest.approx(0.5)


def test_a_step_without_instances_has_no_bubbles() -> None:
    step = Step(0, 0.0)
    assert (step.idle_bubble, step.occupancy_bubble) == (0.0, 0.0)


class TestTimes:
    def tape(self) -> Tape:
        """Ten requests start at 2 s and finish at 3, 4, ..., 12 s; the trainer asks at 1 s."""
        tape = Tape("i")
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

    def test_a_trajectory_ends_when_its_tool_says_so(self) -> None:
        tape = Tape("i")
        tape.start(2, ("a/0", "i"))
        tape.at(4, ev.TurnFinished("a/0", 1, 7))
        tape.at(6, ev.TrajectoryEnded("a/0", 1))
        tape.at(20, ev.BatchRequested(), deliver(sample("a/0", tokens=7)))
        step = tape.metrics.steps[0]
        assert (step.t50_s, step.t99_s, step.partial) == (4.0, 4.0, False)

    def test_a_sample_that_ended_before_the_run_was_seen_makes_its_step_partial(self) -> None:
        tape = Tape("i")
        tape.start(2, ("a/0", "i"))
        tape.finish(4, "a/0", 1, 7, deliver(sample("a/0"), sample("a/1")))
        tape.start(5, ("b/0", "i"))
        tape.finish(7, "b/0", 2, 7, deliver(sample("b/0"), version=1))
        assert [step.partial for step in tape.metrics.steps] == [True, False]

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
        tape = Tape("i")
        for number, (begin, end) in enumerate([(0, 5), (6, 10), (11, 20)]):
            tape.start(begin, (f"g{number}/0", "i"))
            one = sample(f"g{number}/0", tokens=8)
            tape.finish(end, f"g{number}/0", number + 1, 8, deliver(one, version=number))
        summary = tape.metrics.summary(30.0)
        assert summary.steady_accepted_tokens_per_s == 16 / (20 - 5)
        assert (summary.first_step_s, summary.steady_s, summary.drain_s) == (5.0, 15.0, 10.0)

    def test_a_direct_request_launches_no_group(self) -> None:
        """Both groups were launched in the first step, whatever clients ask for in the second."""
        tape = Tape("i")
        tape.start(0, ("g0/0", "i"), ("g1/0", "i"))
        tape.finish(5, "g0/0", 1, 8, deliver(sample("g0/0", tokens=8)))
        tape.at(6, ev.Woke(), Dispatch("direct.1", 3, "i", 10, 100, 0))
        tape.finish(9, "g1/0", 2, 8, deliver(sample("g1/0", tokens=8), version=1))
        assert tape.metrics.summary(30.0).steady_accepted_tokens_per_s is None


class TestParts:
    """A step ends with the last part of its batch."""

    def tape(self, **options: float) -> Tape:
        """The trainer asks at 0 s; groups of one sample run from 1 s and go at 4, 6 and 20 s."""
        tape = Tape("i", **options)
        tape.at(0, ev.BatchRequested(parts=True))
        tape.start(1, *[(f"{group}/0", "i") for group in "abc"])
        a, b, c = (sample(f"{group}/0", tokens=10) for group in "abc")
        tape.finish(4, "a/0", 1, 10, deliver(a, last=False))
        tape.finish(6, "b/0", 2, 10, deliver(b, part=1, last=False))
        assert not tape.metrics.steps
        tape.finish(20, "c/0", 3, 10, deliver(c, part=2))
        return tape

    def test_parts_of_a_step_are_counted_together(self) -> None:
        (step,) = self.tape().metrics.steps
        assert (step.samples, step.tokens, step.fresh_tokens) == (3, 30, 30)
        assert (step.start_s, step.end_s, step.span_s, step.rollout_s) == (0.0, 20.0, 19.0, 19.0)
        assert (step.t50_s, step.t99_s) == (5.0, 19.0)

    def test_trainer_wait_lasts_until_the_last_part_by_default(self) -> None:
        (step,) = self.tape().metrics.steps
        assert step.trainer_wait_s == 20.0

    def test_while_it_trains_a_part_it_does_not_wait(self) -> None:
        """A part has 20 tokens: busy from 4 to 8 s, so with the second, which came at 6, to 12."""
        (step,) = self.tape(train_s_per_token=0.2).metrics.steps
        assert step.trainer_wait_s == 4.0 + 8.0

    def test_the_next_step_is_measured_anew(self) -> None:
        tape = self.tape(train_s_per_token=0.2)
        tape.at(30, ev.WeightsPublished(1))
        tape.at(30, ev.BatchRequested(parts=True))
        tape.start(31, ("d/0", "i"))
        tape.finish(33, "d/0", 4, 10, deliver(sample("d/0"), version=1))
        step = tape.metrics.steps[1]
        assert (step.samples, step.trainer_wait_s, step.span_s, step.t50_s) == (1, 3.0, 2.0, 2.0)

    def test_a_last_part_without_samples(self) -> None:
        tape = Tape("i")
        tape.at(0, ev.BatchRequested(parts=True))
        tape.start(1, ("a/0", "i"))
        tape.finish(4, "a/0", 1, 10, deliver(sample("a/0", 10, (0,), 2), last=False))
        tape.at(9, ev.SubmissionsClosed(), deliver(part=1))
        (step,) = tape.metrics.steps
        assert (step.samples, step.end_s, step.span_s, step.max_staleness) == (1, 9.0, 8.0, 2)

    def test_asking_again_does_not_end_the_wait(self) -> None:
        tape = Tape("i")
        tape.at(0, ev.BatchRequested(parts=True))
        tape.start(1, ("a/0", "i"))
        tape.at(3, ev.BatchRequested())
        tape.finish(4, "a/0", 1, 10, deliver(sample("a/0")))
        assert tape.metrics.steps[0].trainer_wait_s == 4.0


class TestStaleness:
    def test_histogram_mean_and_worst(self) -> None:
        tape = Tape("i")
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
        tape = Tape("i")
        tape.start(0, ("old/0", "i"))
        for number in range(3):
            tape.start(number, (f"g{number}/0", "i"))
            tape.at(number, ev.Woke(), deliver(sample(f"g{number}/0"), version=number))
        tape.start(3, ("old/0", "i"))
        tape.at(4, ev.Woke(), deliver(sample("old/0"), version=3))
        assert tape.metrics.summary(5.0).oldest_prompt_age_steps == 3


def test_staleness_falls_into_the_bucket_that_holds_it() -> None:
    trained = Trained()
    samples = tuple(sample_trained("g/0", staleness=staleness) for staleness in (0, 0, 1, 5, 999))
    tell(trained, [(0.0, ev.Woke(), [act.Deliver(0, 0, samples)])])
    by_bound = dict(zip((*STALENESS, None), trained.staleness.counts, strict=True))
    assert {bound: n for bound, n in by_bound.items() if n} == {0: 2, 1: 1, 6: 1, None: 1}
    assert trained.staleness.sum == 1005


def test_discarded_long_samples_are_a_bias() -> None:
    trained = Trained()
    assert trained.length_ratio == 1.0
    samples = (sample_trained("g/0", 10, group="g"), sample_trained("g/1", 30, group="g"))
    thrown = act.Discard("g/2", 140, "surplus", ends=True, group="g")
    tell(trained, [(0.0, ev.Woke(), [act.Deliver(0, 0, samples), thrown])])
    assert trained.tokens.sum == 40
    assert trained.length_ratio == pytest.approx(20 / 60)


@pytest.mark.parametrize(
    "discard",
    [act.Discard("g/0", 99, "stale", group="g"), act.Discard("direct", 99, "failed", ends=True)],
)
def test_restarted_or_direct_requests_are_no_bias(discard: act.Discard) -> None:
    trained = Trained()
    delivered = act.Deliver(0, 0, (sample_trained("g/0", 10, group="g"),))
    tell(trained, [(0.0, ev.Woke(), [delivered, discard])])
    assert trained.length_ratio == 1.0
