"""Reward functions in TRL's form."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from msgspec.structs import replace

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.trl.scoring import Scores, score
from rollout_sched.live.trainer.samples import Sample

ROW = {"prompt": "q", "answer": 2}


class Tokenizer:
    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return [" ".join(map(str, one)) for one in ids]


def samples() -> list[Sample]:
    return [
        Sample("a", index, [1], [index] * 2, [1, 1], None, [0, 0], [], 0, "stop", "COMPLETED", 0)
        for index in range(3)
    ]


def scored(*funcs: Any, row: dict[str, Any] = ROW) -> Scores:
    return asyncio.run(score(funcs, row, samples(), Tokenizer()))


def test_what_a_function_gets() -> None:
    got: dict[str, Any] = {}

    def reward(**columns: Any) -> list[float]:
        got.update(columns)
        return [0.0, 1.0, 2.0]

    scores = scored(reward)
    assert got == {
        "prompts": ["q"] * 3,
        "completions": ["0 0", "1 1", "2 2"],
        "completion_ids": [[0, 0], [1, 1], [2, 2]],
        "answer": [2] * 3,
    }
    assert scores.rewards == [0.0, 1.0, 2.0]
    assert scores.advantages == pytest.approx([-1.2247, 0.0, 1.2247], abs=1e-3)
    assert scores.metrics(2) == {
        "reward": 2.0,
        "reward_std": pytest.approx(0.8165, abs=1e-3),
        "rewards/reward": 2.0,
    }


def test_messages_are_answered_with_messages() -> None:
    scores = scored(lambda **_: [0.0] * 3, row={"prompt": [{"role": "user", "content": "q"}]})
    assert scores.completions[1] == [{"role": "assistant", "content": "1 1"}]


def test_rewards_add_up_and_none_is_no_reward() -> None:
    async def some(**_: Any) -> list[float | None]:
        return [1.0, None, None]

    def others(**_: Any) -> list[float | None]:
        return [2.0, 5.0, None]

    scores = scored(some, others)
    assert scores.rewards[:2] == [3.0, 5.0]
    assert math.isnan(scores.rewards[2])
    assert scores.advantages == pytest.approx([-1.0, 1.0, 0.0], abs=1e-3)


def test_a_group_without_any_reward() -> None:
    scores = scored(lambda **_: [None] * 3)
    assert scores.advantages == [0.0] * 3
    assert math.isnan(scores.metrics(0)["reward_std"])


def test_too_few_rewards() -> None:
    def short(**_: Any) -> list[float]:
        return [1.0]

    with pytest.raises(CallerError, match="short gave 1 rewards for 3"):
        scored(short)


def test_what_the_scheduler_has_found_out_counts_as_one_of_them() -> None:
    rewarded = [replace(one, reward=float(index)) for index, one in enumerate(samples())]

    def bonus(**_: Any) -> list[float]:
        return [1.0, 0.0, 0.0]

    found = asyncio.run(score([bonus], ROW, rewarded, Tokenizer()))
    assert found.rewards == [1.0, 1.0, 2.0]
    assert found.by_func == {"scheduler": [0.0, 1.0, 2.0], "bonus": [1.0, 0.0, 0.0]}
    assert asyncio.run(score([], ROW, rewarded, Tokenizer())).rewards == [0.0, 1.0, 2.0]
