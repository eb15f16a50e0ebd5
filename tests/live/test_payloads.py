"""Payloads: each attempt is asked for prompt and transcript, and its answer checked."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import Spans
from rollout_sched.live.ports import (
    AnswerUntrue,
    InstanceError,
    OnTokens,
    Order,
    Outcome,
    Output,
    PromptToken,
)
from rollout_sched.live.requests.token_payload import DraftTest, Piece, TokenPayload
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


class TestDrafts:
    """[1, 2] is the prompt; 5 6 7 were made under version 3, and are verified under 4."""

    DISPATCH = Dispatch("r", 2, "i0", 5, 9, 4, 3, 5, draft=((3, 3),))

    def payload(self, sampling: dict[str, Any] | None = None) -> TokenPayload:
        store = TokenPayload([1, 2], sampling or {}, test=DraftTest(0.0))
        store.transcript.keep(1, 3, Piece([5, 6, 7], [-1.0, -1.0, -1.0]))
        return store

    def run(
        self,
        store: TokenPayload,
        thought: Sequence[PromptToken] | None,
        *,
        stops: bool = False,
        spans: Spans = (),
    ) -> tuple[list[Order], list[int], Outcome]:
        """The orders, what was said to have passed, and what came of it; it goes on with 8."""
        orders: list[Order] = []
        told: list[int] = []

        class Instance(Scripted):
            async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
                orders.append(order)
                if len(orders) == 1:
                    prompt = None if thought is None else list(thought)
                    return Output([99], [-1.0], "length", spans, prompt)
                return Output([8], [-0.5], "stop", ((4, 1),))

        async def passed(tokens: int) -> Dispatch | None:
            told.append(tokens)
            store.transcript.cut(3 - tokens)
            rest = msgspec.structs.replace(self.DISPATCH, max_new_tokens=12 - tokens, draft=())
            return None if stops else rest

        outcome = asyncio.run(store.attempt_verified(Instance(), self.DISPATCH, "o", passed))
        return orders, told, outcome

    def test_one_order_hears_what_is_thought_of_it_and_one_goes_on(self) -> None:
        store = self.payload()
        likely = [PromptToken(-7.0, 9), *[PromptToken(-0.25, 1)] * 3]
        (first, second), told, outcome = self.run(store, likely)
        assert (first.token_ids, first.max_new_tokens, first.salt) == ([1, 2, 5, 6, 7], 1, "v4")
        assert first.sampling == {"logprobs": 0, "prompt_logprobs": 0}
        assert (second.token_ids, second.max_new_tokens) == ([1, 2, 5, 6, 7], 9)
        assert second.sampling == {"logprobs": 0}
        assert told == [3]
        assert (outcome.tokens, outcome.finish, outcome.piece.token_ids) == (1, "stop", [8])
        assert store.logprobs == [-0.25] * 3
        assert store.transcript.joined.drawn_logprobs == [-1.0] * 3

    def test_it_goes_on_where_it_was_cut(self) -> None:
        store = self.payload()
        thought = [PromptToken(-7.0, 9), PromptToken(-0.25, 1), PromptToken(-9999.0, 80)]
        (_, second), told, _ = self.run(store, [*thought, PromptToken(-0.25, 1)])
        assert told == [1]
        assert (second.token_ids, second.max_new_tokens) == ([1, 2, 5], 11)
        assert store.logprobs == [-0.25]

    def test_greedy_is_held_to_what_is_likeliest(self) -> None:
        thought = [PromptToken(-7.0, 9), *[PromptToken(-9.0, 1)] * 2, PromptToken(-0.1, 2)]
        _, told, _ = self.run(self.payload({"temperature": 0}), thought)
        assert told == [2]

    def test_one_that_is_to_stop_makes_nothing(self) -> None:
        orders, _, outcome = self.run(self.payload(), [PromptToken(-0.5, 1)] * 4, stops=True)
        assert len(orders) == 1
        assert (outcome.tokens, outcome.finish) == (0, "abort")

    @pytest.mark.parametrize(
        ("thought", "text"),
        [
            (None, "5 tokens came with 0"),
            ([PromptToken(-0.5, 1)] * 3, "came with 3"),
            ([PromptToken(-0.5, 1)] * 5, "came with 5"),
            ([PromptToken(-0.5, 1)] * 3 + [PromptToken(2.5, 1)], "--logprobs-mode"),
            ([PromptToken(-0.5, 1)] * 3 + [PromptToken(math.nan, 1)], "--logprobs-mode"),
            ([PromptToken(-0.5, 1)] * 3 + [PromptToken(-math.inf, 1)], "--logprobs-mode"),
        ],
    )
    def test_what_cannot_be_is_the_instance_s_fault_and_nothing_is_lost(
        self, thought: list[PromptToken] | None, text: str
    ) -> None:
        store = self.payload()
        with pytest.raises(AnswerUntrue, match=text):
            self.run(store, thought)
        assert store.response_ids == [5, 6, 7]
        assert store.logprobs == [-1.0] * 3

    def test_a_whole_response_of_which_all_has_passed_needs_no_second_order(self) -> None:
        store = self.payload()
        orders: list[Order] = []

        class Instance(Scripted):
            async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
                orders.append(order)
                return Output([99], [-1.0], "length", (), [PromptToken(-0.5, 1)] * 4)

        async def passed(tokens: int) -> Dispatch:
            assert tokens == 3
            return msgspec.structs.replace(self.DISPATCH, draft=(), ends=True)

        outcome = asyncio.run(store.attempt_verified(Instance(), self.DISPATCH, "o", passed))
        assert len(orders) == 1
        assert (outcome.tokens, outcome.finish) == (0, "stop")

    def test_older_weights_verify_nothing(self) -> None:
        with pytest.raises(AnswerUntrue, match="used an older one"):
            self.run(self.payload(), [PromptToken(-0.5, 1)] * 4, spans=((3, 1),))

    def test_what_a_tool_has_answered_is_kept_as_a_whole_or_not_at_all(self) -> None:
        store = self.payload()
        store.transcript.observe(1, [20])
        store.transcript.keep(2, 1, Piece([8], [-1.0]))
        good, bad = PromptToken(-0.5, 1), PromptToken(-9999.0, 9)
        assert store.kept(self.DISPATCH, [good, good, good, bad]) == 3
        assert store.kept(self.DISPATCH, [good, good, bad, good]) == 0
        assert store.kept(self.DISPATCH, [good, good]) == 2  # all that was to be verified
