"""Payloads: each attempt is asked for prompt and transcript, and its answer checked."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.core.actions import Dispatch
from rollout_sched.live.payloads import TokenPayload
from rollout_sched.live.ports import InstanceError, Output
from rollout_sched.live.transcript import Piece
from tests.live.scripted import Scripted


def payload(**other: int) -> TokenPayload:
    return TokenPayload([1, 2], {"logprobs": 0}, **other)  # type: ignore[arg-type]


def test_without_log_probabilities() -> None:
    store = TokenPayload([1], {})
    store.transcript.keep(1, 1, Piece([5], None))
    assert store.logprobs is None


def test_an_order_is_prompt_and_pieces() -> None:
    async def scene() -> None:
        instance = Scripted()
        store = payload()
        store.transcript.keep(1, 1, Piece([5], [-1.0]))
        dispatch = Dispatch("r", 2, "i0", 3, 9, 4, 1, 3)
        attempt = asyncio.create_task(store.attempt(instance, dispatch, "o"))
        order = await instance.order()
        assert (order.token_ids, order.salt, order.max_new_tokens) == ([1, 2, 5], "v4", 9)
        await instance.answer(0, [6])
        outcome = await attempt
        assert (outcome.tokens, outcome.finish) == (1, "stop")

    asyncio.run(scene())


def test_a_stream_that_breaks_off_leaves_what_it_brought() -> None:
    async def scene() -> None:
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
        store.transcript.keep(3, 3, store.transcript.partial(3, 3))
        assert store.response_ids == [5, 6, 7]
        assert store.logprobs == [-0.5] * 3

    asyncio.run(scene())


@pytest.mark.parametrize("logprobs", [None, [], [-1.0, -1.0]])
def test_missing_log_probabilities_are_the_instances_fault(logprobs: list[float] | None) -> None:
    async def scene() -> None:
        instance = Scripted()
        attempt = asyncio.create_task(
            payload().attempt(instance, Dispatch("r", 1, "i0", 2, 9, 0), "o")
        )
        order = await instance.order()
        instance._answers[order.id].set_result(Output([5], logprobs, "stop"))
        with pytest.raises(InstanceError, match="log-probabilities"):
            await attempt

    asyncio.run(scene())
