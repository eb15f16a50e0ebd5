"""Payloads: each attempt is asked for prompt and transcript, and its answer checked."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.live.ports import (
    InstanceError,
    Output,
)
from rollout_sched.live.requests.token_payload import (
    JoinedPieces,
    Piece,
    TokenPayload,
    TokenTranscript,
)
from tests.live.scripted import Scripted


def payload(**other: int) -> TokenPayload:
    return TokenPayload([1, 2], {"logprobs": 0}, **other)  # type: ignore[arg-type]


def test_without_log_probabilities() -> None:
    store = TokenPayload([1], {})
    store.transcript.append(1, 1, Piece([5], None))
    assert store.logprobs is None


async def test_an_order_is_prompt_and_pieces() -> None:
    instance = Scripted()
    store = payload()
    store.transcript.append(1, 1, Piece([5], [-1.0]))
    dispatch = Dispatch("r", 2, "i0", 3, 9, 4, 1, 3)
    attempt = asyncio.create_task(store.attempt(instance, dispatch, "o"))
    order = await instance.order()
    assert (order.token_ids, order.salt, order.max_new_tokens) == ([1, 2, 5], "v4", 9)
    await instance.answer(0, [6])
    outcome = await attempt
    assert (outcome.tokens, outcome.finish) == (1, "stop")


@pytest.mark.parametrize("texts", [None, {5: "a</", 6: "q", 7: ">b", 8: "c"}])
async def test_a_stop_string_over_a_cut_ends_a_response(texts: dict[int, str] | None) -> None:
    """If the instance tells the text; tokens that come after it are never streamed."""
    instance = Scripted()
    instance.texts = texts
    store = TokenPayload([1, 2], {"logprobs": 0, "stop": "</q>"}, stream_every=1)
    assert store.resumable
    store.transcript.append(1, 1, Piece([5], [-1.0]))
    dispatch = Dispatch("r", 2, "i0", 3, 9, 4)
    attempt = asyncio.create_task(store.attempt(instance, dispatch, "o"))
    if texts is None:
        outcome = await attempt
        assert (outcome.tokens, outcome.finish, outcome.resumable) == (0, "abort", False)
        assert not instance.orders
        return
    assert not (await instance.order()).stream_every
    await instance.answer(0, [6, 7, 8])
    outcome = await attempt
    assert (outcome.tokens, outcome.finish, outcome.resumable) == (2, "stop", True)
    store.transcript.append(2, outcome.tokens, outcome.piece)
    assert store.response_ids == [5, 6, 7]
    assert len(store.logprobs or ()) == 3


async def test_a_stream_that_breaks_off_leaves_what_it_brought() -> None:
    instance = Scripted()
    store = payload(stream_every=2)
    dispatch = Dispatch("r", 3, "i0", 2, 9, 0)
    attempt = asyncio.create_task(store.attempt(instance, dispatch, "o"))
    await instance.stream(0, [5, 6])
    await instance.stream(0, [7])
    assert store.transcript.streamed(3) == 3
    assert store.transcript.streamed(99) == 0
    await instance.fail(0, InstanceError("reset"))
    with pytest.raises(InstanceError):
        await attempt
    store.transcript.append(3, 3, store.transcript.partial(3, 3))
    assert store.response_ids == [5, 6, 7]
    assert store.logprobs == [-0.5] * 3


@pytest.mark.parametrize("logprobs", [None, [], [-1.0, -1.0]])
async def test_missing_log_probabilities_are_the_instances_fault(
    logprobs: list[float] | None,
) -> None:
    instance = Scripted()
    attempt = asyncio.create_task(payload().attempt(instance, Dispatch("r", 1, "i0", 2, 9, 0), "o"))
    order = await instance.order()
    instance._answers[order.id].set_result(Output([5], logprobs, "stop"))
    with pytest.raises(InstanceError, match="log-probabilities"):
        await attempt


def test_pieces_join_in_order() -> None:
    store = TokenTranscript()
    store.append(1, 2, Piece([5, 6], [-1.0, -2.0]))
    store.append(4, 1, Piece([7], [-3.0]))
    assert store.token_ids == [5, 6, 7]
    assert store.logprobs == [-1.0, -2.0, -3.0]
    assert store.attempts == 2


def test_only_counted_tokens_are_kept() -> None:
    store = TokenTranscript()
    store.append(1, 1, Piece([5, 6], [-1.0, -2.0]))
    assert (store.token_ids, store.logprobs) == ([5], [-1.0])
    store.append(2, 0, Piece([9], [-1.0]))
    assert store.attempts == 1


def test_logprobs_of_a_transcript_are_0_for_observed_tokens() -> None:
    store = TokenTranscript()
    store.append(1, 2, Piece([5, 6], [-1.0, -2.0]))
    store.observe(1, [9])
    store.append(2, 1, Piece([7], [-3.0]))
    assert (store.token_ids, store.logprobs) == ([5, 6, 9, 7], [-1.0, -2.0, 0.0, -3.0])


def test_dropping_one_or_all() -> None:
    store = TokenTranscript()
    store.append(1, 1, Piece([5], [-1.0]))
    store.append(2, 1, Piece([6], [-1.0]))
    store.drop(1)
    assert store.token_ids == [6]
    store.drop(0)
    assert store.token_ids == []


def test_only_counted_tokens_of_a_stream_are_kept() -> None:
    store = TokenTranscript()
    collect = store.collect(3)
    collect([5, 6], [-1.0, -2.0])
    collect([7], [-3.0])
    assert (store.streamed(3), store.attempts) == (3, 0)
    store.append(3, 2, store.partial(3, 2))
    assert (store.token_ids, store.logprobs) == ([5, 6], [-1.0, -2.0])
    assert store.streamed(3) == 0


def test_tokens_streamed_after_the_end_do_not_count() -> None:
    store = TokenTranscript()
    collect = store.collect(3)
    collect([5, 6], [-1.0, -2.0])
    store.append(3, 2, store.partial(3, 2))
    collect([7], [-3.0])  # its client has yet to hear that it is over
    assert (store.token_ids, store.logprobs) == ([5, 6], [-1.0, -2.0])


def test_a_stream_that_brings_no_log_probabilities_once_has_none() -> None:
    store = TokenTranscript()
    collect = store.collect(3)
    collect([5], [-1.0])
    collect([6], None)
    assert store.partial(3, 2) == Piece([5, 6], None)


def joined(*pieces: Piece) -> JoinedPieces:
    return JoinedPieces(dict(enumerate(pieces, 1)))


def test_empty_transcript_has_no_tokens() -> None:
    empty = joined()
    assert (empty.token_ids, empty.mask, empty.logprobs) == ([], [], [])
    assert (empty.turns, empty.turn_ids) == (0, [])


def test_a_response_of_several_attempts_is_one_turn() -> None:
    response = joined(Piece([5, 6], [-1.0, -2.0]), Piece([7], [-3.0]))
    assert response.token_ids == response.turn_ids == [5, 6, 7]
    assert (response.mask, response.turns) == ([1, 1, 1], 0)
    assert response.logprobs == [-1.0, -2.0, -3.0]


def test_tool_tokens_stand_between_turns() -> None:
    response = joined(
        Piece([5], [-1.0]), Piece([6], [-2.0], observed=[9, 9]), Piece([7, 8], [-3.0, -4.0])
    )
    assert response.token_ids == [5, 6, 9, 9, 7, 8]
    assert response.mask == [1, 1, 0, 0, 1, 1]
    assert response.logprobs == [-1.0, -2.0, 0.0, 0.0, -3.0, -4.0]
    assert (response.turns, response.turn_ids) == (1, [7, 8])


def test_a_tool_may_return_nothing() -> None:
    response = joined(Piece([5], None, observed=[]))
    assert (response.turns, response.turn_ids) == (1, [])
    assert (response.token_ids, response.logprobs) == ([5], [])
