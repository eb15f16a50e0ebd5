"""The example that learns, by TRL's trainer, for a few steps."""

from __future__ import annotations

import pytest

from examples.grpo_tiny import STOP
from examples.grpo_trl import main, reward


def test_the_reward_is_the_share_of_wanted_tokens() -> None:
    assert reward(completion_ids=[[4, 8, 5, 6], [4, STOP[0]]], prompts=[]) == [0.5, 1.0]


def test_it_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "8"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    rewards = [float(line.rsplit(maxsplit=1)[1]) for line in said]
    assert len(rewards) == 8
    assert sum(rewards[-2:]) > sum(rewards[:2])
