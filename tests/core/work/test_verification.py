"""Verified resume: what is kept of a draft, what it counts as, and how old it leaves its group."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.model.actions import Deliver, Dispatch, Interrupt
from rollout_sched.core.model.events import (
    BatchRequested,
    InstanceJoined,
    InstancePaused,
    PrefixVerified,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    TokensArrived,
    ToolReturned,
    TrajectoryEnded,
    TurnFinished,
    WeightsPublished,
    WeightsUpdated,
    Woke,
)
from rollout_sched.core.model.model import GroupState, RequestState, Segment
from tests.core.told import BIG, LIMIT, PROMPT, Told, sent, thrown

ROUNDS: dict[str, Any] = {
    "batching": {"use": "sync", "over_prompts": 2.0},
    "interruption": {"use": "partial", "kv": "verify"},
}
ASYNC: dict[str, Any] = {
    "batching": "fully_async",
    "freshness": {"use": "bounded", "max_staleness": 1},
    "interruption": {"use": "partial", "kv": "verify"},
}


def second_round(**roles: Any) -> Told:
    """Group b was set back with 7 tokens of b/0, which finished, and 4 of b/1; version 1 is here.
    Attempts 5 and 6 are the drafts."""
    told = Told(**{**ROUNDS, **roles})
    told.submit("a", samples=1)
    told.submit("b", samples=2)
    told(BatchRequested())
    told(RequestFinished("b/0", 2, 7))
    told(RequestFinished("a/0", 1, 9))
    told(RequestInterrupted("b/1", 3, 4))
    told.submit("c")
    told(WeightsPublished(1))
    told(WeightsUpdated("i0", 1))
    return told


def test_a_set_back_group_goes_on_as_a_draft() -> None:
    told = Told(**ROUNDS)
    told.submit("a", samples=1)
    told.submit("b", samples=2)
    told(BatchRequested())
    told(RequestFinished("b/0", 2, 7))
    assert told(RequestFinished("a/0", 1, 9))[1:] == [Interrupt("b/1", 3, "i0")]
    assert told.scheduler.books.groups["b"].state is GroupState.DEFERRED
    assert told.scheduler.books.groups["b"] not in told.scheduler.books.sample_buffer
    assert told(RequestInterrupted("b/1", 3, 4)) == []
    told.submit("c")
    told(WeightsPublished(1))
    told(WeightsUpdated("i0", 1))
    actions = told(BatchRequested())
    whole = {"salt": 1, "draft": ((0, 7),), "response_tokens": 7, "ends": True}
    assert actions[:2] == [
        sent("b/0", 4, context_tokens=17, max_new_tokens=93, computed_tokens=17, **whole),
        sent(
            "b/1",
            5,
            context_tokens=14,
            max_new_tokens=96,
            computed_tokens=14,
            salt=1,
            draft=((0, 4),),
            response_tokens=4,
        ),
    ]


def test_what_passes_counts_as_made_by_who_verified_it() -> None:
    told = second_round()
    told(BatchRequested())
    assert told(PrefixVerified("b/0", 4, 7)) == []
    assert told.request("b/0").segments == (Segment(1, 7, "i0", verified=True),)
    assert told(PrefixVerified("b/1", 5, 3)) == [thrown("b/1", 1, "rejected")]
    request = told.request("b/1")
    assert request.segments == (Segment(1, 3, "i0", verified=True),)
    assert (request.context_tokens, request.response_tokens) == (PROMPT + 3, 3)
    told(RequestFinished("b/0", 4, 0))
    deliver, *_ = told(RequestFinished("b/1", 5, 2))
    assert isinstance(deliver, Deliver)
    first, second = deliver.samples
    assert (first.response_tokens, first.verified_tokens, first.staleness) == (7, 7, 0)
    assert first.finish == "stop"
    assert (second.response_tokens, second.verified_tokens, second.staleness) == (5, 3, 0)


def test_the_attempt_may_make_as_much_more_as_was_rejected() -> None:
    told = second_round()
    told(BatchRequested())
    told(PrefixVerified("b/1", 5, 0))
    request = told.request("b/1")
    attempt = request.attempt
    assert attempt is not None
    assert (attempt.context_tokens, attempt.max_new_tokens) == (PROMPT, LIMIT)
    assert request.segments == ()
    told(RequestFinished("b/1", 5, LIMIT, reason="length"))
    assert told.request("b/1").response_tokens == LIMIT
    assert not told.anomalies


@pytest.mark.parametrize(("said", "kept"), [(-3, 0), (9, 4)])
def test_more_or_less_than_the_draft_cannot_pass(said: int, kept: int) -> None:
    told = second_round()
    told(BatchRequested())
    told(PrefixVerified("b/1", 5, said))
    assert told.request("b/1").response_tokens == kept
    assert told.anomalies == {"tokens_out_of_range": 1}


def test_what_goes_on_from_an_unverified_draft_counts_for_nothing() -> None:
    told = second_round()
    told(BatchRequested())
    told(TokensArrived("b/1", 5, 1))
    actions = told(RequestFinished("b/1", 5, 3))
    assert actions[0] == thrown("b/1", 3, "untrue", attempt=5)
    assert isinstance(actions[1], Dispatch)
    assert actions[1].draft == ((0, 4),)
    assert told.anomalies == {"tokens_out_of_range": 1, "draft_not_verified": 1}


def test_an_attempt_that_ends_before_the_test_leaves_the_draft_as_it_was() -> None:
    told = second_round()
    told(BatchRequested())
    told(RequestFailed("b/1", 5, "broke"))
    told.seconds = 9.0
    (again,) = told(Woke())
    assert isinstance(again, Dispatch)
    assert again.draft == ((0, 4),)
    assert not told.anomalies


def test_a_verdict_that_nobody_asked_for_is_an_anomaly() -> None:
    told = second_round()
    told(BatchRequested())
    told(PrefixVerified("b/1", 5, 4))
    told(PrefixVerified("b/1", 5, 2))
    told(PrefixVerified("b/1", 77, 2))
    assert told.request("b/1").response_tokens == 4
    assert told.anomalies == {"verified_unasked": 1, "unknown_attempt": 1}


def test_under_the_same_weights_nothing_is_to_be_verified() -> None:
    told = Told(**{**ROUNDS, "interruption": {"use": "partial", "kv": "verify"}})
    told.submit("a")
    told(BatchRequested())
    told(TokensArrived("a/0", 1, 3), RequestFailed("a/0", 1, "broke"))
    told.seconds = 9.0
    (again,) = told(Woke())
    assert isinstance(again, Dispatch)
    assert (again.response_tokens, again.draft) == (3, ())


def test_a_complete_group_that_has_grown_too_old_is_verified_not_thrown_away() -> None:
    told = Told(**{**ASYNC, "freshness": {"use": "bounded", "when_stale": "drop"}})
    told.submit("a")
    told(RequestFinished("a/0", 1, 5))
    told(WeightsPublished(1))
    (draft,) = told(WeightsUpdated("i0", 1))
    assert isinstance(draft, Dispatch)
    assert (draft.request, draft.draft, draft.ends) == ("a/0", ((0, 5),), True)


def test_one_that_finishes_after_its_round_waits_to_be_verified() -> None:
    told = Told(**ROUNDS)
    told.submit("a", "b")
    told(BatchRequested())
    told(RequestFinished("a/0", 1, 9))
    assert told(RequestFinished("b/0", 2, 5)) == []
    request = told.request("b/0")
    assert request.state is RequestState.PARKED
    assert request.ends


def test_one_that_ended_at_its_limit_gives_up_its_last_token() -> None:
    told = Told(**ROUNDS)
    told.submit("a", "b")
    told(BatchRequested())
    told(RequestFinished("a/0", 1, 9))
    last = thrown("b/0", 1, "rejected")
    assert told(RequestFinished("b/0", 2, LIMIT, reason="length")) == [last]
    assert not told.request("b/0").ends


def test_a_whole_response_that_is_cut_goes_on() -> None:
    told = second_round()
    told(BatchRequested())
    told(PrefixVerified("b/0", 4, 5))
    assert not told.request("b/0").ends
    told(RequestFinished("b/0", 4, 3))
    assert told.request("b/0").response_tokens == 8


def test_a_whole_response_under_the_same_weights_is_delivered_as_it_is() -> None:
    """Weights that nobody has published again have nothing to verify; and the last group that is
    launched may so complete a batch."""
    told = Told(**ROUNDS)
    told.submit("a", "b")
    told(BatchRequested())
    told(RequestFinished("a/0", 1, 9))
    told(RequestFinished("b/0", 2, 5))
    told.submit("c")
    (deliver, *_) = told(BatchRequested())
    assert isinstance(deliver, Deliver)
    (sample,) = deliver.samples
    assert (sample.request, sample.response_tokens, sample.verified_tokens) == ("b/0", 5, 0)


@pytest.mark.parametrize("whole", [1, 2])
def test_a_whole_response_under_the_same_weights_spends_no_budget(whole: int) -> None:
    """Its siblings were still parked, so its group was spent before they could go on."""
    budget = {"use": "partial", "kv": "verify", "segment_tokens": 30}
    told = Told(**{**ROUNDS, "interruption": budget})
    told.submit("a")
    told.submit("b", samples=2)
    told(BatchRequested(), RequestFinished("b/0", 2, 7), RequestFinished("a/0", 1, 9))
    assert told.request("b/0").ends
    late = RequestFinished("b/1", 3, 4) if whole == 2 else RequestInterrupted("b/1", 3, 4)
    assert told(late) == []
    told.submit("c")
    actions = told(BatchRequested())
    if whole == 1:
        assert told.scheduler.books.groups["b"].state is GroupState.ACTIVE
        actions = told(RequestFinished("b/1", told.request("b/1").last_attempt, 2))
    assert isinstance(actions[0], Deliver)
    assert {sample.request for sample in actions[0].samples} == {"b/0", "b/1"}


class TestAges:
    def interrupted(self) -> Told:
        """Of group a, a/0 has finished under version 0, and a/1 was stopped with 4 tokens."""
        told = Told(**ASYNC)
        told.submit("a", samples=2)
        told(RequestFinished("a/0", 1, 7))
        told(WeightsPublished(1))
        told(InstancePaused("i0"))
        told(RequestInterrupted("a/1", 2, 4))
        told(WeightsUpdated("i0", 1))
        return told

    def test_a_group_is_as_old_as_what_is_finished(self) -> None:
        told = self.interrupted()
        told(PrefixVerified("a/1", 3, 4))
        assert told.scheduler.books.groups["a"].oldest_version == 0

    def test_what_waits_to_be_verified_has_no_age(self) -> None:
        told = Told(**ASYNC)
        told.submit("a")
        told(WeightsPublished(1))
        told(InstancePaused("i0"))
        assert told.scheduler.books.groups["a"].oldest_version == 0
        told(RequestInterrupted("a/0", 1, 4))
        assert told.scheduler.books.groups["a"].oldest_version is None
        told(WeightsUpdated("i0", 1))
        assert told.scheduler.books.groups["a"].oldest_version == 1
        told(PrefixVerified("a/0", 2, 2))
        assert told.scheduler.books.groups["a"].oldest_version == 1

    def test_a_finished_sample_keeps_the_oldest_it_holds(self) -> None:
        told = self.interrupted()
        told(PrefixVerified("a/1", 3, 4))
        told(BatchRequested())
        told(RequestFinished("a/1", 3, 1))
        assert not told.scheduler.books.groups


class TestTurns:
    def drafted(self, *, ends: bool = False) -> Told:
        """A trajectory of two turns of 5 and 3 tokens, 2 observed between them, was set back."""
        told = Told(**ROUNDS)
        told.submit("a")
        told.submit("b", samples=2)
        told(BatchRequested())
        told(TurnFinished("b/0", 2, 5))
        told(ToolReturned("b/0", 2, 2))
        if ends:
            told(TurnFinished("b/0", 4, 3))
            told(TrajectoryEnded("b/0", 4))
            told(RequestFinished("a/0", 1, 9))
        else:
            told(RequestFinished("a/0", 1, 9))
            told(RequestInterrupted("b/0", 4, 3))
        told(RequestInterrupted("b/1", 3, 0))
        told(WeightsPublished(1))
        told(WeightsUpdated("i0", 1))
        told.submit("c")
        told(BatchRequested())
        return told

    def test_a_cut_in_the_last_turn_keeps_the_turns_before(self) -> None:
        told = self.drafted()
        told(PrefixVerified("b/0", 5, 6))
        request = told.request("b/0")
        assert (request.turn, request.response_tokens) == (1, 6)
        assert request.context_tokens == PROMPT + 6 + 2

    def test_a_cut_before_what_a_tool_has_answered_leaves_nothing(self) -> None:
        told = self.drafted()
        assert told(PrefixVerified("b/0", 5, 4)) == [thrown("b/0", 8, "rejected")]
        request = told.request("b/0")
        assert (request.turn, request.response_tokens) == (0, 0)
        assert request.context_tokens == PROMPT
        attempt = request.attempt
        assert attempt is not None
        assert attempt.max_new_tokens == LIMIT  # what was observed made no room for more

    def test_the_last_turn_of_one_that_has_ended_is_ended_anew(self) -> None:
        told = self.drafted(ends=True)
        request = told.request("b/0")
        assert (request.turn, request.response_tokens, request.ends) == (1, 8, True)
        told(PrefixVerified("b/0", 5, 7))
        told(TurnFinished("b/0", 5, 1))
        told(TrajectoryEnded("b/0", 5))
        assert request.segments == (Segment(1, 7, "i0", verified=True), Segment(1, 1, "i0"))

    def test_one_that_ended_at_what_a_tool_returned_starts_over(self) -> None:
        """There is no room for another turn, and none of the last to end anew."""
        told = Told(**ROUNDS)
        told.submit("a")
        told.submit("b", samples=2)
        told(BatchRequested())
        told(TurnFinished("b/0", 2, 5))
        told(ToolReturned("b/0", 2, BIG))
        request = told.request("b/0")
        assert request.state is RequestState.FINISHED
        assert thrown("b/0", 5, "rejected") in told(RequestFinished("a/0", 1, 9))
        assert (request.turn, request.context_tokens) == (0, PROMPT)


def test_a_lone_client_s_request_is_never_verified() -> None:
    told = Told(**ASYNC)
    told(RequestSubmitted("d", "", PROMPT, LIMIT))
    told(WeightsPublished(1))
    told(InstancePaused("i0"))
    told(RequestInterrupted("d", 1, 4))
    (again,) = told(WeightsUpdated("i0", 1))[-1:]
    assert isinstance(again, Dispatch)
    assert (again.response_tokens, again.draft) == (4, ())


def test_an_instance_that_joins_late_verifies_like_any_other() -> None:
    told = second_round()
    told(InstanceJoined("i1", 8, BIG, 1))
    told(BatchRequested())
    drafts = [a for a in told.scheduler.books.fleet.attempts.values() if a.draft_tokens]
    assert sorted(attempt.draft_tokens for attempt in drafts) == [4, 7]


class TestTrimming:
    def told(self, tested: int, rejected: int) -> Told:
        """Group a has 60 tokens of version 0, and version 1 is here."""
        told = Told(**ASYNC)
        told.submit("a")
        verification = told.scheduler.work.verification
        verification.tested, verification.rejected = tested, rejected
        told(WeightsPublished(1))
        told(InstancePaused("i0"))
        told(RequestInterrupted("a/0", 1, 60))
        return told

    def test_what_would_hardly_pass_is_not_even_sent(self) -> None:
        told = self.told(16 * 10, 16)
        rejected, dispatch = told(WeightsUpdated("i0", 1))[-2:]
        assert rejected == thrown("a/0", 30, "rejected")
        assert isinstance(dispatch, Dispatch)
        assert (dispatch.draft, dispatch.context_tokens) == (((0, 30),), PROMPT + 30)
        assert dispatch.max_new_tokens == LIMIT - 30

    @pytest.mark.parametrize(("tested", "rejected"), [(16 * 10, 15), (16 * 30, 16)])
    def test_it_takes_some_rejections_and_a_draft_that_is_long(
        self, tested: int, rejected: int
    ) -> None:
        dispatch = self.told(tested, rejected)(WeightsUpdated("i0", 1))[-1]
        assert isinstance(dispatch, Dispatch)
        assert dispatch.draft == ((0, 60),)

    def test_a_little_is_always_tested(self) -> None:
        dispatch = self.told(0, 1000)(WeightsUpdated("i0", 1))[-1]
        assert isinstance(dispatch, Dispatch)
        assert dispatch.draft == ((0, 16),)

    def test_what_becomes_of_drafts_is_noted(self) -> None:
        told = self.told(0, 0)
        told(WeightsUpdated("i0", 1))
        told(PrefixVerified("a/0", 2, 25))
        verification = told.scheduler.work.verification
        assert (verification.tested, verification.rejected) == (25, 1)

    def test_the_further_behind_the_sooner(self) -> None:
        told = Told(**{**ASYNC, "freshness": {"use": "bounded", "max_staleness": 9}})
        told.submit("a")
        verification = told.scheduler.work.verification
        verification.tested, verification.rejected = 16 * 10, 16
        told(WeightsPublished(2))
        told(InstancePaused("i0"))
        told(RequestInterrupted("a/0", 1, 60))
        dispatch = told(WeightsUpdated("i0", 2))[-1]
        assert isinstance(dispatch, Dispatch)
        assert dispatch.draft == ((0, 15),)
