"""The scheduler, event by event: what it is told, and exactly what it orders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import (
    Action,
    Deliver,
    Discard,
    Dispatch,
    Interrupt,
    Pause,
    Resume,
    UpdateWeights,
    Wake,
)
from rollout_sched.core.model.events import (
    BatchRequested,
    Event,
    GroupSubmitted,
    InstanceJoined,
    InstanceLost,
    InstancePaused,
    InstanceReported,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    SubmissionsClosed,
    TokensArrived,
    ToolReturned,
    TrajectoryEnded,
    TurnFinished,
    WeightsPublished,
    WeightsUpdated,
    Woke,
)
from rollout_sched.core.model.model import GroupState, InstanceStatus, RequestState, Segment
from rollout_sched.core.state.groups import DEFERRED
from tests.core.told import (
    BIG,
    FULLY_ASYNC,
    LIMIT,
    PROMPT,
    Told,
    begun,
    delivered,
    dispatched,
    facts,
    make_scheduler,
    resumed,
    sample,
    sent,
    tail,
    thrown,
)

PARTIAL = {"use": "partial", "at_update": "in_place"}
BUDGET = {"use": "partial", "segment_tokens": 30}
TWICE = {"use": "sync", "over_prompts": 2.0}  # twice the prompts of a batch under way


def discarded(actions: Iterable[Action]) -> list[Discard]:
    return [action for action in actions if isinstance(action, Discard)]


class TestSyncStep:
    def test_two_groups_on_two_instances(self) -> None:
        told = Told(2, instances=2)
        assert told.submit("a", samples=2) == []
        assert told.submit("b", samples=2) == []
        assert told(BatchRequested()) == [
            sent("a/0", 1, "i0"),
            sent("a/1", 2, "i1"),
            sent("b/0", 3, "i0"),
            sent("b/1", 4, "i1"),
        ]
        assert told(RequestFinished("b/1", 4, 8)) == []
        assert told(RequestFinished("a/0", 1, 5)) == []
        assert told(RequestFinished("b/0", 3, 7)) == [], "b is whole, but a batch is two groups"
        assert told(RequestFinished("a/1", 2, 6)) == [
            Deliver(
                batch=0,
                version=0,
                samples=(
                    sample("a/0", (0, 5, "i0")),
                    sample("a/1", (0, 6, "i1")),
                    sample("b/1", (0, 8, "i1")),
                    sample("b/0", (0, 7, "i0")),
                ),
            )
        ]
        assert not told.scheduler.parts.requests
        assert not told.scheduler.state.groups

    def test_nothing_starts_before_the_trainer_asks(self) -> None:
        told = Told()
        assert told.submit("a", "b") == []
        assert dispatched(told(BatchRequested())) == ["a/0"]
        assert dispatched(told(RequestFinished("a/0", 1, 5))) == [], "the trainer trains"
        assert dispatched(told(BatchRequested())) == ["b/0"]

    def test_the_next_step_has_new_weights(self) -> None:
        told = begun("a", "b")
        told(RequestFinished("a/0", 1, 5))
        assert told(WeightsPublished(1)) == [UpdateWeights("i0", 1)]
        assert told(BatchRequested()) == [], "nothing may run under old weights"
        assert told(WeightsUpdated("i0", 1)) == [sent("b/0", 2, salt=1)]
        assert told(RequestFinished("b/0", 2, 5)) == [
            Deliver(batch=1, version=1, samples=(sample("b/0", (1, 5, "i0")),))
        ]

    def test_prompts_per_step_is_at_least_one(self) -> None:
        with pytest.raises(CallerError, match="at least 1"):
            make_scheduler(0)


class TestSurplus:
    """One sample more than the group needs is asked for; the first two make it whole."""

    def told(self) -> Told:
        told = Told(2, slots=5, batching=tail(1.0, 1.5))
        told.submit("a", "b", samples=2)
        assert dispatched(told(BatchRequested())) == ["a/0", "a/1", "a/2", "b/0", "b/1"]
        told(RequestFinished("a/2", 3, 5))
        return told

    def test_complete_group_ends_surplus_requests(self) -> None:
        told = self.told()
        assert told(RequestFinished("a/0", 1, 5)) == [
            Interrupt("a/1", 2, "i0"),
            thrown("a/1", 0, "surplus", ends=True),
        ]
        assert "a/1" not in told.scheduler.parts.requests

    @pytest.mark.parametrize(
        ("answer", "wasted"),
        [
            (RequestFinished("a/1", 2, 9), 9),
            (TurnFinished("a/1", 2, 9), 9),
            (RequestInterrupted("a/1", 2, 0), 0),
            (RequestFailed("a/1", 2, "500"), 0),
        ],
    )
    def test_any_answer_of_surplus_is_discarded(self, answer: Event, wasted: int) -> None:
        told = self.told()
        told(RequestFinished("a/0", 1, 5))
        expected = [thrown("a/1", wasted, "surplus", attempt=2)] if wasted else []
        assert discarded(told(answer)) == expected
        assert told.instance("i0").in_flight == 3
        assert not told.anomalies

    def test_stopping_attempt_is_interrupted_once(self) -> None:
        interruption = {"use": "partial", "at_update": "resubmit"}
        told = begun(
            "a",
            "b",
            samples=2,
            prompts_per_step=2,
            slots=5,
            batching=tail(1.0, 1.5),
            freshness="unbounded",
            interruption=interruption,
        )
        told(RequestFinished("a/2", 3, 5))
        assert told(WeightsPublished(1)) == [Pause("i0", "abort", clear_cache=True)]
        assert told(RequestFinished("a/0", 1, 5)) == [thrown("a/1", 0, "surplus", ends=True)]


class TestFailure:
    """What a failed attempt does to its request, its group and its instance; see test_blame.py."""

    def told(self) -> Told:
        told = Told(instances=2)
        told.submit("a")
        assert told(BatchRequested()) == [sent("a/0", 1, "i0")]
        return told

    def test_failed_request_continues_elsewhere_from_streamed_tokens(self) -> None:
        told = self.told()
        told(TokensArrived("a/0", 1, 7))
        assert told(RequestFailed("a/0", 1, "reset by peer")) == [resumed("a/0", 2, "i1", made=7)]
        assert told(RequestFinished("a/0", 2, 3)) == [
            Deliver(0, 0, (sample("a/0", (0, 7, "i0"), (0, 3, "i1")),))
        ]

    def test_unusable_tokens_are_discarded(self) -> None:
        told = self.told()
        told(TokensArrived("a/0", 1, 7))
        assert told(RequestFailed("a/0", 1, "it said more after its end", usable=False)) == [
            thrown("a/0", 7, "untrue", attempt=1),
            sent("a/0", 2, "i1"),
        ]

    def test_unreached_instance_rests(self) -> None:
        told = self.told()
        told.seconds = 100.0
        assert told(RequestFailed("a/0", 1, "connection refused", blame="instance")) == [
            Wake(at=101.0),
            sent("a/0", 2, "i1"),
        ]
        assert told.request("a/0").failures == 0, "it never got there"

    def test_request_waits_for_a_resting_only_instance(self) -> None:
        told = begun("a")
        assert told(RequestFailed("a/0", 1, blame="instance")) == [Wake(at=1.0)]
        told.seconds = 0.5
        assert told(Woke()) == [Wake(at=1.0)], "woken too early: it must not be forgotten"
        told.seconds = 1.0
        assert told(Woke()) == [sent("a/0", 2)]

    def test_simultaneous_failures_are_one_incident(self) -> None:
        told = Told(batching="fully_async", freshness="unbounded", slots=8)
        told.submit("a", samples=8)
        assert told(RequestFailed("a/0", 1, blame="instance")) == [Wake(at=1.0)]
        told.seconds = 0.5
        for attempt in range(2, 9):
            assert told(RequestFailed(f"a/{attempt - 1}", attempt, blame="instance")) == []
        told.seconds = 1.0
        dispatches = told(Woke())
        assert len(dispatches) == 8
        assert told(RequestFailed("a/0", 9, blame="instance")) == [Wake(at=3.0)]

    def test_failures_in_a_row_double_the_rest_up_to_64_times(self) -> None:
        told = begun("a")
        rests = []
        for attempt in range(1, 10):
            (wake,) = told(RequestFailed("a/0", attempt, blame="instance"))
            rests.append(wake.at - told.seconds)
            told.seconds = wake.at
            told(Woke())
        assert rests == [1, 2, 4, 8, 16, 32, 64, 64, 64]

    def test_an_answer_ends_the_row(self) -> None:
        told = begun("a", samples=2)
        assert told(RequestFailed("a/0", 1, blame="instance")) == [Wake(1.0)]
        told(RequestFinished("a/1", 2, 5))
        told.seconds = 1.0
        told(Woke())
        assert told(RequestFailed("a/0", 3, blame="instance")) == [Wake(2.0)]

    def test_faulty_request_fails_its_group(self) -> None:
        told = begun("a", samples=3, slots=2)
        told(RequestFinished("a/0", 1, 5))  # a/1 and a/2 run
        told(TokensArrived("a/1", 2, 4))
        assert told(RequestFailed("a/1", 2, "too long", blame="request")) == [
            thrown("a/0", 5, "failed", ends=True),
            thrown("a/1", 4, "failed", ends=True),
            Interrupt("a/2", 3, "i0"),
            thrown("a/2", 0, "failed", ends=True),
        ]
        assert not told.scheduler.state.groups
        assert not told.scheduler.parts.requests
        assert told(RequestInterrupted("a/2", 3, 6)) == [thrown("a/2", 6, "failed", attempt=3)]

    def test_the_request_is_at_fault_so_the_instance_does_not_rest(self) -> None:
        told = begun("a", "b", slots=1)
        actions = told(RequestFailed("a/0", 1, "too long", blame="request"))
        assert actions == [thrown("a/0", 0, "failed", ends=True), sent("b/0", 2)]


class TestLostInstance:
    def told(self) -> Told:
        told = begun("a", samples=2, instances=2)
        assert told.running == ["a/0", "a/1"]
        return told

    def test_streamed_tokens_survive_a_loss(self) -> None:
        told = self.told()
        told(TokensArrived("a/0", 1, 7))
        assert told(InstanceLost("i0")) == [resumed("a/0", 3, "i1", made=7)]
        assert told.request("a/0").segments == (Segment(0, 7, "i0"),)

    def test_a_response_streamed_to_its_limit_is_finished(self) -> None:
        told = self.told()
        told(TokensArrived("a/0", 1, LIMIT))
        assert told(InstanceLost("i0")) == []
        assert told(RequestFinished("a/1", 2, 5)) == [
            Deliver(
                0,
                0,
                (sample("a/0", (0, LIMIT, "i0"), finish="length"), sample("a/1", (0, 5, "i1"))),
            )
        ]

    def test_one_streamed_to_its_limit_may_make_its_sibling_surplus(self) -> None:
        """Both were on the lost instance: the second must not go on after its group is whole."""
        told = begun("a", "b", prompts_per_step=2, batching=tail(1.0, 2.0))
        told(TokensArrived("a/0", 1, LIMIT), TokensArrived("a/1", 2, 7))
        assert told(InstanceLost("i0")) == [thrown("a/1", 7, "surplus", ends=True)]

    def test_a_request_that_instances_die_of_is_given_up(self) -> None:
        """Not one that made progress, was answered, or whose instance was removed on purpose."""
        told = begun("a")
        lost = [InstanceLost("i0"), InstanceJoined("i0", 8, BIG)]
        for attempt in range(1, 5):
            assert told(*lost) == [sent("a/0", attempt + 1)]
        told(InstanceLost("i0", requested=True), InstanceJoined("i0", 8, BIG))
        told(TokensArrived("a/0", 6, 7))
        assert told(*lost) == [resumed("a/0", 7, made=7)]
        told(RequestInterrupted("a/0", 7, 0), Woke())
        for attempt in range(8, 12):
            told.seconds += 100
            assert told(Woke(), *lost) == [resumed("a/0", attempt + 1, made=7)]
        told(InstanceLost("i0"))
        assert not told.scheduler.state.groups

    def test_rejoined_instance_has_lost_its_attempts(self) -> None:
        told = self.told()
        told(TokensArrived("a/0", 1, 7))
        assert told(InstanceJoined("i0", 8, BIG)) == [resumed("a/0", 3, "i0", made=7)]
        assert told(RequestFinished("a/0", 1, 9)) == [], "an answer from its former life"
        assert told.anomalies == {"unknown_attempt": 1}
        assert list(told.scheduler.state.fleet.attempts) == [2, 3]


class TestTurns:
    def told(self) -> Told:
        told = begun("a", slots=1)
        assert told(TurnFinished("a/0", 1, 20)) == []
        return told

    def test_the_next_turn_has_the_observation_in_its_context(self) -> None:
        told = self.told()
        assert told.request("a/0").state is RequestState.ACTING
        assert told(ToolReturned("a/0", 1, 30)) == [
            resumed("a/0", 2, made=20, context_tokens=PROMPT + 20 + 30, turn=1)
        ]
        assert told(RequestFinished("a/0", 2, 5)) == [
            Deliver(0, 0, (sample("a/0", (0, 20, "i0"), (0, 5, "i0")),))
        ]

    @pytest.mark.parametrize(
        "again", [ToolReturned("a/0", 1, 30), ToolReturned("a/0", 2, 30), ToolReturned("b/0", 1, 3)]
    )
    def test_unwanted_tool_result_is_dropped(self, again: Event) -> None:
        told = self.told()
        told(ToolReturned("a/0", 1, 30))
        assert told(again) == []
        assert told.anomalies == {"unknown_turn": 1}
        assert told.request("a/0").context_tokens == PROMPT + 20 + 30

    def test_the_tool_of_an_earlier_turn_is_late(self) -> None:
        told = self.told()
        told(ToolReturned("a/0", 1, 30), TurnFinished("a/0", 2, 5))
        assert told(ToolReturned("a/0", 1, 30)) == []
        assert told.anomalies == {"unknown_turn": 1}
        assert dispatched(told(ToolReturned("a/0", 2, 1))) == ["a/0"]

    def test_a_tool_that_returns_less_than_nothing(self) -> None:
        told = self.told()
        (dispatch,) = told(ToolReturned("a/0", 1, -30))
        assert dispatch.context_tokens == PROMPT + 20
        assert told.anomalies == {"tokens_out_of_range": 1}

    @pytest.mark.parametrize("reason", ["stop", "length"])
    def test_a_tool_may_say_that_no_turn_follows(self, reason: Any) -> None:
        told = self.told()
        assert told(TrajectoryEnded("a/0", 1, reason)) == [
            Deliver(0, 0, (sample("a/0", (0, 20, "i0"), finish=reason),))
        ]
        assert told(ToolReturned("a/0", 1, 30)) == []
        assert told.anomalies == {"unknown_turn": 1}

    def test_a_trajectory_without_a_token_that_starts_over_says_so(self) -> None:
        """Its observations are thrown away too, so whoever keeps them must hear of it."""
        told = begun("a", "b", batching=TWICE, freshness="unbounded", slots=1)
        told(TurnFinished("a/0", 1, 0))
        told(ToolReturned("a/0", 1, 30))
        gone = [a for a in told(RequestFinished("b/0", 2, 5)) if isinstance(a, Discard)]
        assert [(a.request, a.tokens, a.attempt, a.ends) for a in gone] == [("a/0", 0, 0, False)]

    def test_a_turn_that_used_up_the_response_is_the_last(self) -> None:
        told = begun("a")
        assert told(TurnFinished("a/0", 1, LIMIT)) == [
            Deliver(0, 0, (sample("a/0", (0, LIMIT, "i0"), finish="length"),))
        ]

    def test_a_tool_that_returns_to_a_group_set_back_lets_it_wait(self) -> None:
        told = begun("a", "b", batching=TWICE, freshness="unbounded", interruption=PARTIAL)
        told(TurnFinished("a/0", 1, 20))
        assert delivered(told(RequestFinished("b/0", 2, 5))) == ["b/0"]
        assert told(ToolReturned("a/0", 1, 30)) == []
        assert told.request("a/0").state is RequestState.PARKED
        (dispatch,) = told(BatchRequested())
        assert (dispatch.context_tokens, dispatch.turn) == (PROMPT + 20 + 30, 1)


class TestSegmentBudget:
    def test_parks_until_the_next_round(self) -> None:
        told = Told(batching=TWICE, freshness="unbounded", interruption=BUDGET)
        told.submit("a", "b")
        assert told(BatchRequested()) == [
            sent("a/0", 1, max_new_tokens=30),
            sent("b/0", 2, max_new_tokens=30),
        ]
        assert told(RequestFinished("a/0", 1, 30, reason="length")) == []
        assert told.request("a/0").state is RequestState.PARKED
        assert delivered(told(RequestFinished("b/0", 2, 5))) == ["b/0"]
        assert told(BatchRequested()) == [resumed("a/0", 3, made=30, max_new_tokens=30)]

    def test_other_groups_replace_those_that_spent_their_budget(self) -> None:
        told = Told(2, freshness="unbounded", interruption=BUDGET)
        told.submit("a", "b", "c", samples=2)
        assert dispatched(told(BatchRequested())) == ["a/0", "a/1", "b/0", "b/1"]
        assert told(RequestFinished("a/0", 1, 30, reason="length")) == []
        assert told.scheduler.state.groups["a"].state is GroupState.ACTIVE, "a/1 runs"
        assert dispatched(told(RequestFinished("a/1", 2, 5))) == ["c/0", "c/1"]
        assert told.scheduler.state.groups["a"].state is GroupState.SPENT
        told(RequestFinished("b/0", 3, 5), RequestFinished("b/1", 4, 5))
        told(RequestFinished("c/0", 5, 5))
        assert delivered(told(RequestFinished("c/1", 6, 5))) == ["b/0", "b/1", "c/0", "c/1"]
        assert told.scheduler.state.groups["a"].state is DEFERRED

    def test_is_renewed_at_once_when_nothing_else_can_fill_the_batch(self) -> None:
        told = begun("a", "b", "c", prompts_per_step=2, interruption=BUDGET)
        assert dispatched(told(RequestFinished("a/0", 1, 30, reason="length"))) == ["a/0"], (
            "at staleness 0 no other may start"
        )

    def test_spent_group_continues_when_its_batch_waits(self) -> None:
        bound = {"use": "bounded", "max_staleness": 1}
        told = begun("a", "b", "c", "d", batching=TWICE, freshness=bound, interruption=BUDGET)
        told(RequestFinished("a/0", 1, 30, reason="length"))
        told(RequestFinished("b/0", 2, 5))
        told(WeightsPublished(1), WeightsUpdated("i0", 1))
        assert dispatched(told(BatchRequested())) == ["a/0", "c/0"]
        assert told(RequestFinished("a/0", 3, 30, reason="length")) == []
        told.submit("e")
        assert dispatched(told(RequestFinished("c/0", 4, 5))) == ["a/0"], "at version 1 a is due"
        assert delivered(told(RequestFinished("a/0", 5, 5))) == ["a/0"]

    def test_due_groups_continue_when_submissions_are_closed(self) -> None:
        """The last groups all spent their budget, were too many for what the batch seemed to lack,
        and started over from their first token, for ever."""
        bound = {"use": "bounded", "max_staleness": 1}
        told = Told(2, freshness=bound, interruption=BUDGET)
        told.submit(*"abcdef")
        told(SubmissionsClosed(), BatchRequested())
        assert dispatched(told(RequestFinished("a/0", 1, 30, reason="length"))) == ["c/0"]
        told(RequestFinished("b/0", 2, 5))
        assert delivered(told(RequestFinished("c/0", 3, 5))) == ["b/0", "c/0"]
        told(WeightsPublished(1), WeightsUpdated("i0", 1))
        assert dispatched(told(BatchRequested())) == ["a/0", "d/0"]
        assert dispatched(told(RequestFinished("a/0", 4, 30, reason="length"))) == ["e/0"]
        told(RequestFinished("d/0", 5, 5))
        assert dispatched(told(RequestFinished("e/0", 6, 30, reason="length"))) == ["f/0"]
        segments, batch = 0, []
        while not batch:
            segments += 1
            assert segments <= 9, "a, e and f have four each, three of which are made"
            attempt = next(iter(told.scheduler.state.fleet.attempts.values()))
            made = attempt.max_new_tokens
            name = attempt.request.id
            actions = told(RequestFinished(name, attempt.id, made, reason="length"))
            assert discarded(actions) == []
            batch = delivered(actions)
        assert batch == ["a/0", "d/0"]

    def test_a_resting_request_keeps_its_group_in_the_round(self) -> None:
        told = Told(2, freshness="unbounded", interruption=BUDGET)
        told.submit("a", samples=2)
        told.submit("b", "c")
        told(BatchRequested(), RequestInterrupted("a/0", 1, 5))
        assert told.request("a/0").rests_until
        told(RequestFinished("a/1", 2, 30, reason="length"))
        assert told.scheduler.state.groups["a"].state is GroupState.ACTIVE
        told.seconds = 100.0
        assert dispatched(told(Woke())) == ["a/0"]

    def test_the_last_budget_is_the_rest_of_the_limit(self) -> None:
        told = begun("a", interruption=BUDGET)
        limits = []
        for attempt in range(1, 4):
            (dispatch,) = told(RequestFinished("a/0", attempt, 30, reason="length"))
            limits.append(dispatch.max_new_tokens)
        assert limits == [30, 30, LIMIT - 90]
        assert told(RequestFinished("a/0", 4, 10, reason="length")) == [
            Deliver(
                0,
                0,
                (sample("a/0", *[(0, 30, "i0")] * 3, (0, 10, "i0"), finish="length"),),
            )
        ]

    def test_without_rounds_it_goes_on_at_once(self) -> None:
        told = Told(interruption=BUDGET, **FULLY_ASYNC)
        told.submit("a", "b")
        assert dispatched(told(RequestFinished("a/0", 1, 30, reason="length"))) == ["a/0"]

    def test_a_chunk_goes_on_at_once_and_anywhere(self) -> None:
        told = Told(2, instances=2, interruption=BUDGET | {"segment": "chunk"})
        told.submit("a", "b", samples=2)
        told(BatchRequested(), RequestFinished("a/1", 2, 5), RequestFinished("b/1", 4, 5))
        (dispatch,) = told(RequestFinished("a/0", 1, 30, reason="length"))
        assert (dispatch.request, dispatch.instance) == ("a/0", "i1"), "i0 has another to run"
        assert (dispatch.context_tokens, dispatch.max_new_tokens) == (PROMPT + 30, 30)


class TestEndOfResponse:
    @pytest.mark.parametrize(
        ("tokens", "reason", "finish"),
        [(5, "stop", "stop"), (LIMIT, "stop", "stop"), (LIMIT, "length", "length")],
    )
    def test_stop_or_length(self, tokens: int, reason: Any, finish: str) -> None:
        told = begun("a")
        assert told(RequestFinished("a/0", 1, tokens, reason=reason)) == [
            Deliver(0, 0, (sample("a/0", (0, tokens, "i0"), finish=finish),))
        ]

    def test_length_short_of_the_limit_is_the_end_too(self) -> None:
        """The instance ran out of context: asking again would not help."""
        told = begun("a", interruption={"use": "partial", "segment_tokens": 30})
        assert told(RequestFinished("a/0", 1, 20, reason="length")) == [
            Deliver(0, 0, (sample("a/0", (0, 20, "i0"), finish="length"),))
        ]

    def test_an_empty_response_is_a_sample(self) -> None:
        told = begun("a")
        assert told(RequestFinished("a/0", 1, 0)) == [Deliver(0, 0, (sample("a/0"),))]

    @pytest.mark.parametrize(("said", "counted"), [(-5, 0), (LIMIT + 1, LIMIT), (10**9, LIMIT)])
    def test_tokens_out_of_range_are_clamped(self, said: int, counted: int) -> None:
        told = begun("a")
        (batch,) = told(RequestFinished("a/0", 1, said))
        assert batch.samples[0].response_tokens == counted
        assert told.anomalies == {"tokens_out_of_range": 1}

    @pytest.mark.parametrize("tokens", [-1, 4, LIMIT + 1])
    def test_a_stream_cannot_run_backwards_or_over(self, tokens: int) -> None:
        told = begun("a")
        told(TokensArrived("a/0", 1, 5))
        assert told(TokensArrived("a/0", 1, tokens)) == []
        assert told.anomalies == {"tokens_out_of_range": 1}
        assert told.request("a/0").known_tokens == 5


class TestTailBatching:
    def test_a_short_round_sets_the_tail_back_to_start_over(self) -> None:
        told = Told(2, batching=tail(1.5, 1.5))
        told.submit("a", "b", "c", "d", samples=2)
        assert dispatched(told(BatchRequested())) == [
            *("a/0", "a/1", "a/2"),
            *("b/0", "b/1", "b/2"),
            *("c/0", "c/1"),
        ]
        told(RequestFinished("a/0", 1, 5), RequestFinished("a/1", 2, 5))  # c/2 follows
        told(RequestFinished("c/0", 7, 5), RequestFinished("b/0", 4, 5))
        assert told(RequestFinished("b/1", 5, 6)) == [
            Interrupt("b/2", 6, "i0"),
            thrown("b/2", 0, "surplus", ends=True),
            Deliver(
                0,
                0,
                (
                    sample("a/0", (0, 5, "i0")),
                    sample("a/1", (0, 5, "i0")),
                    sample("b/0", (0, 5, "i0")),
                    sample("b/1", (0, 6, "i0")),
                ),
            ),
            Interrupt("c/2", 9, "i0"),
            thrown("c/2", 0, "deferred", ends=True),
            thrown("c/0", 5, "deferred"),
            Interrupt("c/1", 8, "i0"),
        ]
        group = told.scheduler.state.groups["c"]
        assert [request.state for request in group.requests] == [RequestState.PARKED] * 2
        assert [request.finish for request in group.requests] == ["", ""]
        assert (group.state, group.oldest_version, group.siblings.lengths) == (DEFERRED, None, [])
        assert told(RequestInterrupted("c/1", 8, 40)) == [thrown("c/1", 40, "deferred", attempt=8)]

    def test_a_long_round_collects_the_tail_without_more_samples(self) -> None:
        told = Told(1, slots=20, batching=tail(1.5, 1.5))
        told.submit("a", "b", "c", samples=2)
        assert dispatched(told(BatchRequested()))[3:] == ["b/0", "b/1", "b/2"]
        told(RequestFinished("a/0", 1, 5), RequestFinished("a/1", 2, 5))
        assert told(BatchRequested()) == [sent("b/0", 7), sent("b/1", 8)]

    def test_a_tail_too_small_for_a_batch_lies_by(self) -> None:
        told = Told(2, slots=20, batching=tail(1.5, 1.0))
        told.submit("a", "b", "c", "d", "e", "f")
        assert dispatched(told(BatchRequested())) == ["a/0", "b/0", "c/0"]
        told(RequestFinished("a/0", 1, 5), RequestFinished("b/0", 2, 5))
        assert dispatched(told(BatchRequested())) == ["d/0", "e/0", "f/0"]


class TestPartialRollout:
    def told(self, **roles: Any) -> Told:
        """One prompt a step, three under way, two at a time: a is made, b runs, c waits."""
        batching = {"use": "sync", "over_prompts": 3.0}
        told = Told(slots=2, batching=batching, interruption=PARTIAL, **roles)
        told.submit("a", "b", "c", "d", "e")
        told(BatchRequested())
        assert told.running == ["a/0", "b/0"]
        return told

    def test_deferred_group_keeps_its_tokens(self) -> None:
        told = self.told(freshness="unbounded")
        assert told(RequestFinished("a/0", 1, 5)) == [
            Deliver(0, 0, (sample("a/0", (0, 5, "i0")),)),
            Interrupt("b/0", 2, "i0"),
        ]
        assert told(RequestInterrupted("b/0", 2, 40)) == []
        states = {request.id: request.state for request in told.scheduler.parts.requests}
        assert states == {"b/0": RequestState.PARKED, "c/0": RequestState.PARKED}
        assert sum(r.response_tokens for r in told.scheduler.parts.requests.replay_buffer) == 40

    def test_deferred_group_continues_first(self) -> None:
        told = self.told(freshness="unbounded", ordering="resumed_first")
        told(RequestFinished("a/0", 1, 5), RequestInterrupted("b/0", 2, 40))
        assert told(BatchRequested()) == [
            resumed("b/0", 3, made=40),
            sent("c/0", 4),
        ]
        assert told(RequestFinished("b/0", 3, 2))[0] == Deliver(
            1, 0, (sample("b/0", (0, 40, "i0"), (0, 2, "i0")),)
        )

    def test_a_round_that_begins_before_the_interrupt_is_answered(self) -> None:
        told = self.told(freshness="unbounded")
        told(RequestFinished("a/0", 1, 5))
        assert dispatched(told(BatchRequested())) == ["c/0"], "b/0 has not come back"
        assert dispatched(told(RequestInterrupted("b/0", 2, 40))) == ["b/0"]

    def test_deferred_group_needs_no_more_room(self) -> None:
        bounded = {"use": "bounded", "max_staleness": 1}
        told = begun("a", "b", "c", batching=TWICE, freshness=bounded, interruption=PARTIAL)
        told(RequestFinished("a/0", 1, 5), RequestInterrupted("b/0", 2, 40))
        assert dispatched(told(BatchRequested())) == ["b/0"], "but there is none for c"


class TestFullyAsync:
    def test_pacing_never_exceeds_room(self) -> None:
        """Two groups a batch and one version of slack: (version + 2) * 2 groups ever."""
        bounded = {"use": "bounded", "max_staleness": 1}
        told = Told(2, slots=99, batching="fully_async", freshness=bounded, interruption=PARTIAL)
        told.submit(*(f"g{number}" for number in range(20)))
        for version in range(1, 6):
            ever = 2 * (version + 1)
            assert told.running == [f"g{number}/0" for number in range(ever - 4, ever)]
            told(BatchRequested())
            for attempt in (ever - 3, ever - 2):
                told(RequestFinished(f"g{attempt - 1}/0", attempt, 5))
            assert told.scheduler.state.progress.delivered == 2 * version
            told(WeightsPublished(version), InstancePaused("i0"))
            assert told.scheduler.state.progress.fresh == 20 - ever
            told(WeightsUpdated("i0", version))

    def test_a_batch_is_made_of_the_oldest(self) -> None:
        told = Told(1, slots=2, interruption=PARTIAL, **FULLY_ASYNC)
        told.submit("a", "b")
        told(WeightsPublished(1), InstancePaused("i0"), WeightsUpdated("i0", 1))
        told(RequestInterrupted("b/0", 2, 0))  # both are still dated by version 0
        told.seconds = 1.0
        told(Woke())
        told.submit("c")
        told(RequestFinished("a/0", 1, 5))
        told(RequestFinished("c/0", 4, 5), RequestFinished("b/0", 3, 5))
        order = []
        for _ in range(3):
            order += delivered(told(BatchRequested()))
        assert order == ["a/0", "b/0", "c/0"]


class TestWeightUpdate:
    @pytest.mark.parametrize(("kv", "salt"), [("retain", 0), ("recompute", 1)])
    def test_kv_goes_on_under_the_salt_it_was_made_with(self, kv: str, salt: int) -> None:
        partial = {"use": "partial", "kv": kv, "at_update": "resubmit"}
        told = Told(interruption=partial, **FULLY_ASYNC)
        told.submit("a")
        assert told(WeightsPublished(1)) == [Pause("i0", "abort", clear_cache=kv == "recompute")]
        assert told.request("a/0").state is RequestState.INTERRUPTING
        assert told(RequestInterrupted("a/0", 1, 40)) == []
        assert told(InstancePaused("i0")) == [UpdateWeights("i0", 1)]
        assert told(WeightsUpdated("i0", 1)) == [
            Resume("i0"),
            resumed("a/0", 2, made=40, salt=salt),
        ]

    def test_confirmations_not_asked_for_are_counted(self) -> None:
        told = Told()
        assert told(InstancePaused("i0")) == []
        assert told(WeightsUpdated("i0", 0)) == []
        assert told(WeightsUpdated("i0", 7)) == []
        assert told.anomalies == {
            "pause_not_asked_for": 1,
            "update_not_asked_for": 1,
            "version_never_published": 1,
        }
        assert told.instance("i0").status is InstanceStatus.SERVING


class TestSpans:
    def told(self) -> Told:
        """a/0 was sent under version 3 and lived through the update to 4."""
        told = Told(version=3, interruption=PARTIAL, **FULLY_ASYNC)
        told.submit("a")
        told(WeightsPublished(4), InstancePaused("i0"), WeightsUpdated("i0", 4))
        told(BatchRequested())
        return told

    @pytest.mark.parametrize(
        ("spans", "segments"),
        [
            (((3, 30), (4, 10)), [(3, 30, "i0"), (4, 10, "i0")]),
            (((3, 40),), [(3, 40, "i0")]),
            (((4, 40),), [(4, 40, "i0")]),
            (((3, 0), (4, 40)), [(4, 40, "i0")]),
            ((), [(3, 40, "i0")]),
        ],
    )
    def test_as_reported_or_the_oldest_they_can_be(
        self, spans: Any, segments: list[tuple[int, int, str]]
    ) -> None:
        told = self.told()
        oldest = min(version for version, _, _ in segments)
        assert told(RequestFinished("a/0", 1, 40, spans)) == [
            Deliver(0, 4, (sample("a/0", *segments, staleness=4 - oldest),))
        ]
        assert not told.anomalies

    @pytest.mark.parametrize(
        "lie",
        [
            ((3, 30), (4, 11)),
            ((3, 30), (4, 9)),
            ((3, 41), (4, -1)),
            ((4, 30), (3, 10)),
            ((3, 30), (5, 10)),
        ],
    )
    def test_spans_that_lie_count_as_the_oldest_they_can_be(self, lie: Any) -> None:
        told = self.told()
        assert told(RequestFinished("a/0", 1, 40, lie)) == [
            Deliver(0, 4, (sample("a/0", (3, 40, "i0"), staleness=1),))
        ]
        assert told.anomalies == {"spans_do_not_fit": 1}

    def test_older_than_dispatched_is_believed_and_counted(self) -> None:
        told = self.told()
        assert told(RequestFinished("a/0", 1, 40, ((2, 40),))) == [
            Deliver(0, 4, (sample("a/0", (2, 40, "i0"), staleness=2),))
        ]
        assert told.anomalies == {"version_older_than_dispatched": 1}


class TestAnswersToNobody:
    @pytest.mark.parametrize(
        "event",
        [
            RequestFinished("a/0", 9, 5),
            RequestFinished("b/0", 1, 5),
            RequestInterrupted("a/0", 9, 5),
            TurnFinished("a/0", 9, 5),
            RequestFailed("a/0", 9),
            TokensArrived("a/0", 9, 5),
        ],
    )
    def test_they_are_counted_and_change_nothing(self, event: Event) -> None:
        told = begun("a")
        before = facts(told.scheduler)
        assert told(event) == []
        assert told.anomalies == {"unknown_attempt": 1}
        told.scheduler.state.anomalies.clear()
        assert facts(told.scheduler) == before

    @pytest.mark.parametrize(
        "event",
        [
            InstanceLost("nobody"),
            InstanceReported("nobody", 0, 0, 0.0),
            InstancePaused("nobody"),
            WeightsUpdated("nobody", 0),
        ],
    )
    def test_an_instance_nobody_knows(self, event: Event) -> None:
        told = Told()
        assert told(event) == []
        assert told.anomalies == {"unknown_instance": 1}


class TestCallerErrors:
    def told(self) -> Told:
        told = Told(2, slots=2, batching=TWICE, freshness="unbounded", interruption=PARTIAL)
        told.submit("a", "b", "c", samples=2)
        told(BatchRequested(), TokensArrived("a/0", 1, 5), RequestFinished("a/1", 2, 5))
        told(WeightsPublished(3))
        return told

    @pytest.mark.parametrize(
        ("event", "text"),
        [
            (GroupSubmitted("a", 1, 1, 1), "group 'a' is already here"),
            (GroupSubmitted("x", 0, 1, 1), "must be at least 1, not 0, 1 and 1"),
            (GroupSubmitted("x", 1, 0, 1), "must be at least 1, not 1, 0 and 1"),
            (GroupSubmitted("x", 1, 1, 0), "must be at least 1, not 1, 1 and 0"),
            (GroupSubmitted("x", 1, 1, BIG), f"is {BIG + 1}, but the largest instance holds"),
            (WeightsPublished(3), "version 3 is not after 3; versions must increase"),
            (WeightsPublished(2), "version 2 is not after 3; versions must increase"),
            (InstanceJoined("new", 0, BIG), "slots and kv_tokens must be at least 1"),
            (InstanceJoined("new", 8, 0), "slots and kv_tokens must be at least 1, not 8 and 0"),
            (InstanceJoined("i0", 8, PROMPT + LIMIT - 1), f"is {PROMPT + LIMIT}, but the largest"),
        ],
    )
    def test_errors_give_a_reason_and_change_nothing(self, event: Event, text: str) -> None:
        told = self.told()
        before = facts(told.scheduler)
        with pytest.raises(CallerError, match=text):
            told(event)
        assert facts(told.scheduler) == before

    def test_nothing_comes_after_the_end(self) -> None:
        told = self.told()
        told(SubmissionsClosed())
        before = facts(told.scheduler)
        with pytest.raises(CallerError, match="after submissions were closed"):
            told.submit("x")
        assert facts(told.scheduler) == before

    def test_facts_tell_two_states_apart(self) -> None:
        """Or the tests above would say nothing."""
        one, other = self.told(), self.told()
        assert facts(one.scheduler) == facts(other.scheduler)
        other(TokensArrived("a/0", 1, 6))
        assert facts(one.scheduler) != facts(other.scheduler)

    def test_a_group_may_fill_the_largest_instance(self) -> None:
        told = Told()
        told(InstanceJoined("small", 8, 50))
        with pytest.raises(CallerError, match="lower max_tokens"):
            told(GroupSubmitted("a", 1, 20, BIG - 19))
        told(GroupSubmitted("a", 1, 20, BIG - 20))

    def test_before_any_instance_joined_nothing_is_too_large(self) -> None:
        told = Told(instances=0)
        told(GroupSubmitted("a", 1, 10**9, 1))
        with pytest.raises(CallerError, match="group 'a'"):
            told(InstanceJoined("i0", 8, BIG))

    def test_an_id_may_be_used_again_once_its_group_is_gone(self) -> None:
        told = begun("a")
        told(RequestFinished("a/0", 1, 5))
        assert told.submit("a") == []


class TestPrediction:
    def test_a_finished_sibling_lets_another_group_go_first(self) -> None:
        told = Told(2, slots=1, prediction="group_history", ordering="longest_first")
        told.submit("a", samples=2)
        told.submit("b")
        told(BatchRequested())
        assert [request.id for request in told.scheduler.parts.requests.waiting] == ["a/1", "b/0"]
        assert dispatched(told(RequestFinished("a/0", 1, 20))) == ["b/0"]

    def test_running_request_weighs_its_expected_tokens(self) -> None:
        told = begun("a", samples=2, slots=2, prediction="group_history", routing="least_tokens")
        i0 = told.instance("i0")
        assert i0.tokens == 2 * (PROMPT + LIMIT)
        told(RequestFinished("a/0", 1, 20))
        assert i0.tokens == PROMPT + 20
        told(TokensArrived("a/1", 2, 60))
        assert i0.tokens == PROMPT + 60, "it has outrun what its sibling taught"


class TestFoundByTheLaws:
    def test_a_round_does_not_begin_on_instances_that_are_still_to_be_updated(self) -> None:
        """Rolling updates leave old weights serving: what they made would be too old at once."""
        rolling = {"use": "rolling", "at_once": 1}
        told = begun("a", "b", instances=2, freshness={"max_staleness": 0}, weights=rolling)
        told(RequestFinished("a/0", 1, 5))
        (update,) = told(WeightsPublished(1))
        assert isinstance(update, UpdateWeights)
        told(BatchRequested())
        assert told.running == []
        _, dispatch = told(WeightsUpdated(update.instance, 1))
        assert isinstance(dispatch, Dispatch)
        assert dispatch.instance == update.instance
        (deliver,) = told(RequestFinished("b/0", dispatch.attempt, 5))
        assert deliver.samples[0].staleness == 0


class TestFoundByReview:
    """Bugs that were found by reading or by hostile events; each has its reproducer."""

    def test_a_join_that_is_refused_loses_nothing(self) -> None:
        told = begun("a", slots=2)
        with pytest.raises(CallerError, match="at least 1"):
            told(InstanceJoined("i0", 0, BIG))
        assert told.running == ["a/0"]

    def test_an_instance_from_the_future_is_refused(self) -> None:
        told = Told()
        with pytest.raises(CallerError, match="joined with version 7, but the trainer is at 0"):
            told(InstanceJoined("i9", 2, BIG, 7))

    def test_a_batch_recalls_the_group_that_is_due_not_one_without_tokens(self) -> None:
        told = Told(
            3,
            instances=0,
            version=1,
            batching=tail(1.34, 1.0),
            freshness={"use": "bounded", "max_staleness": 1},
            interruption=PARTIAL,
        )
        told(InstanceJoined("i", 2, BIG, 1))
        told.submit(*(f"g{n}" for n in range(12)))
        told(BatchRequested(), *(RequestFinished(f"g{n}/0", n + 1, 5) for n in range(3)))
        told(RequestInterrupted("g3/0", 4, 5), WeightsPublished(2), WeightsUpdated("i", 2))
        told(BatchRequested())
        for _ in range(3):
            oldest = min(told.scheduler.state.fleet.attempts.values(), key=lambda a: a.id)
            told(RequestFinished(oldest.request.id, oldest.id, 5))
        assert told.request("g3/0").state in (RequestState.WAITING, RequestState.RUNNING)

    def test_streamed_tokens_nobody_wants_any_more_are_discarded_when_the_attempt_fails(
        self,
    ) -> None:
        told = begun("a", "b", batching=tail(1.0, 2.0), slots=2)
        told(TokensArrived("a/1", 2, 9), RequestFinished("a/0", 1, 5))
        assert thrown("a/1", 9, "surplus", attempt=2) in told(RequestFailed("a/1", 2))

    def test_unwanted_streamed_tokens_are_discarded_on_a_loss(self) -> None:
        """Whoever holds the tokens keeps what came; a loss has to say that they do not count."""
        told = begun("a", "b", batching=tail(1.0, 2.0), slots=2)
        told(RequestFinished("a/0", 1, 5), TokensArrived("a/1", 2, 9))
        assert thrown("a/1", 9, "surplus", attempt=2) in told(InstanceLost("i0"))

    def test_failures_count_in_a_row(self) -> None:
        told = Told()
        told.scheduler.parts.outcomes.max_failures = 2
        told.submit("a")
        told(BatchRequested(), RequestFailed("a/0", 1))
        told.seconds = 100.0
        told(Woke(), TurnFinished("a/0", 2, 5), ToolReturned("a/0", 2, 1))
        told(RequestFailed("a/0", 3))
        assert told.request("a/0").failures == 1

    def test_a_request_whose_observation_fills_the_cache_ends_with_length(self) -> None:
        told = begun("a", slots=2)
        told(TurnFinished("a/0", 1, 5))
        (deliver,) = told(ToolReturned("a/0", 1, BIG))
        assert deliver.samples[0].finish == "length"

    def test_a_request_may_not_outgrow_the_cache(self) -> None:
        told = begun("a", slots=2)
        told(TurnFinished("a/0", 1, 5))
        (dispatch,) = told(ToolReturned("a/0", 1, BIG - PROMPT - 5 - 20))
        assert dispatch.max_new_tokens == 20
