"""Clients' requests at a front: the scheduler's answer reaches the waiting client once."""

from __future__ import annotations

from rollout_sched.core.model.actions import Answer, Dispatch
from rollout_sched.core.model.events import (
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    TokensArrived,
)
from rollout_sched.core.model.records import DeliveredSample, Segment
from rollout_sched.link.client_calls import ClientCall
from rollout_sched.link.protocol import RejectRequest
from rollout_sched.live.requests.token_payload import Piece, TokenPayload
from tests.link.fixtures import Stage
from tests.live.scripted import until


async def test_calls_have_unique_ids_and_end_once() -> None:
    async with Stage(1) as stage:
        calls = stage.fronts[0].remote.calls
        first, second = stage.ask(), stage.ask()
        assert [call.name for call in calls.every()] == ["run.f0.1", "run.f0.2"]
        assert calls["run.f0.1"].payload is first
        await stage.instance.answer(0, [7])
        await until(lambda: first.heard)
        assert [call.payload for call in calls.every()] == [second]
        calls.withdraw("run.f0.2")
        await until(lambda: second.heard)
        assert not len(calls)
        calls.withdraw("run.f0.2")


async def test_refusal_reaches_the_client_once() -> None:
    async with Stage(1) as stage:
        front = stage.fronts[0]
        caller = stage.ask()
        await stage.instance.order(0)
        front.connected.order(RejectRequest(stage.request, "there is no room"))
        late = DeliveredSample(stage.request, "g", 0, 3, 0, (), 0, "stop")
        front.connected.order(Answer(late))
        await until(lambda: caller.heard)
        assert caller.heard == [("failed", "there is no room")]
        assert not len(front.remote.calls)
        assert not front.broken


def call() -> ClientCall:
    return ClientCall(TokenPayload([1, 2], {}), RequestSubmitted("r", "g", 2, 9, "s", 3))


def dispatch(attempt: int, instance: str = "i0", most: int = 9) -> Dispatch:
    return Dispatch("r", attempt, instance, 2, most, 0)


def test_tokens_belong_to_their_spans_or_the_instance_version() -> None:
    one = call()
    one.begun(dispatch(1), 4)
    one.reported(TokensArrived("r", 1, 2))
    assert one.segments == (Segment(4, 2, "i0"),)
    one.reported(RequestInterrupted("r", 1, 3, ((4, 1), (5, 2))))
    one.begun(dispatch(2, "i1"), 6)
    one.reported(RequestFinished("r", 2, 99, ((6, 1),)))
    assert one.segments == (Segment(4, 1, "i0"), Segment(5, 2, "i0"), Segment(6, 9, "i1"))


def test_finished_call_is_complete_until_discarded() -> None:
    one = call()
    one.begun(dispatch(1), 0)
    one.reported(RequestFinished("r", 1, 3, (), "stop"))
    whole = one.whole()
    assert whole == DeliveredSample("r", "g", 0, 2, 3, (Segment(0, 3, "i0"),), 0, "stop")
    assert one.resubmission("r1").ends
    one.discarded(0)
    assert not one.resubmission("r2").ends
    one.begun(dispatch(1, most=3), 0)
    one.reported(RequestFinished("r", 1, 3, (), "length"))
    assert one.whole() is None
    assert not one.resubmission("r3").ends


def test_unusable_or_discarded_tokens_do_not_count() -> None:
    one = call()
    one.begun(dispatch(1), 0)
    one.reported(RequestInterrupted("r", 1, 3))
    one.begun(dispatch(2), 0)
    one.reported(TokensArrived("r", 2, 2))
    one.reported(RequestFailed("r", 2, "untrue", usable=False))
    one.reported(RequestFinished("r", 2, 5))
    assert one.segments == (Segment(0, 3, "i0"),)
    one.begun(dispatch(3), 0)
    one.reported(TokensArrived("r", 3, 2))
    one.reported(RequestFailed("r", 3, "broke off"))
    assert one.segments == (Segment(0, 3, "i0"), Segment(0, 2, "i0"))
    one.discarded(1)
    assert one.segments == (Segment(0, 2, "i0"),)
    one.discarded(0)
    assert one.segments == ()


def test_another_scheduler_continues_a_call_under_a_new_id() -> None:
    one = call()
    transcript = one.payload.transcript
    for epoch, tokens in (("a", [7, 8]), ("b", [9])):
        submitted = one.resubmission(f"r-{epoch}")
        assert submitted.prior_segments == one.segments
        one.begun(dispatch(1), 0)  # each scheduler numbers its own attempts
        one.reported(RequestInterrupted("r", 1, len(tokens)))
        transcript.append(1, len(tokens), Piece(tokens, None))
    again = one.resubmission("r-c")
    assert again == RequestSubmitted(
        "r-c", "g", 2, 9, "s", 3, (Segment(0, 2, "i0"), Segment(0, 1, "i0"))
    )
    assert one.payload.response_ids == [7, 8, 9]
    assert one.name == "r"
