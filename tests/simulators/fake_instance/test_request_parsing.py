"""How requests are understood."""

from __future__ import annotations

import pytest

from rollout_sched.live.ports import Order
from rollout_sched.simulators.fake_instance import tokens as text
from rollout_sched.simulators.fake_instance.protocol import Refusal
from rollout_sched.simulators.fake_instance.requests import (
    Message,
    RequestLimits,
    output_limit,
    prompts_of,
    siblings,
    words,
)

LIMITS = RequestLimits("m", 100, 1)


def test_prompts_are_texts_or_ids_or_lists_of_such() -> None:
    assert prompts_of("w1 w2") == [[1, 2]]
    assert prompts_of([1, 2]) == [[1, 2]]
    assert prompts_of([[1], [2, 3]]) == [[1], [2, 3]]
    assert prompts_of(["w1", [2]]) == [[1], [2]]
    with pytest.raises(Refusal, match="list of such"):
        prompts_of([1, [2]])


def test_a_next_turn_begins_with_the_last_one() -> None:
    hello = Message("user", "Hello")
    first = text.encode(words([hello]))
    answer = text.decode([text.LARGEST.first_name, text.LARGEST.first_word])
    turn = text.encode(words([hello, Message("assistant", answer), Message("user", None)]))
    assert turn[: len(first) + 2] == [*first, text.LARGEST.first_name, text.LARGEST.first_word]


def test_an_output_limit_is_clamped_or_refused() -> None:
    assert output_limit(LIMITS, [1] * 90, None, clamp=False) == 10
    assert output_limit(LIMITS, [1] * 90, 5, clamp=False) == 5
    assert output_limit(LIMITS, [1] * 90, 50, clamp=True) == 10
    for max_tokens, clamp in ((50, False), (0, True), ("5", True)):
        with pytest.raises(Refusal):
            output_limit(LIMITS, [1] * 90, max_tokens, clamp=clamp)
    with pytest.raises(Refusal):
        output_limit(LIMITS, [1] * 100, None, clamp=True)


def test_seeds_of_siblings_count_up() -> None:
    order = Order("a", [1], 5, "s", {"seed": 7, "logprobs": 0})
    made = siblings(order, 2)
    assert [one.sampling for one in made] == [
        {"seed": 7, "logprobs": 0},
        {"seed": 8, "logprobs": 0},
    ]
    assert made[0] == order
    unseeded = Order("a", [1], 5, "s", {})
    assert siblings(unseeded, 2) == [unseeded, unseeded]
