"""The example that learns, as far as it goes without torch and vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from examples.grpo_tiny import STOP, Job, main, prompts, reward, share
from rollout_sched.client import Sample
from tests.neighbours.fleet import fake_instance


def test_a_simulated_instance_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_instance() as instance:
        code = main(["--instance", instance.url, "--model", str(tmp_path)])
    assert code == 2
    said = capsys.readouterr().err
    assert "Simulated instances cannot be used here, because their tokens" in said
    assert "Traceback" not in said


def test_servers_without_their_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--instance", "http://127.0.0.1:1"]) == 2
    assert "--model is missing" in capsys.readouterr().err


def said(*token_ids: int) -> Sample:
    mask = [1] * len(token_ids)
    return Sample("a", 0, [1], list(token_ids), mask, None, mask, [], 0, "stop", "COMPLETED", 0)


def test_the_reward_is_the_share_of_wanted_tokens() -> None:
    assert asyncio.run(reward(said(4, 8, 5, 6))) == 0.5
    assert share([4, 8, STOP[0]]) == 1.0, "what ends a response does not count"
    assert share([STOP[0]]) == 0.0, "saying nothing is no way out"


def test_each_prompt_is_there_once() -> None:
    job = Job(steps=3, prompts_per_step=5)
    made = prompts(job)
    assert len({prompt.uid for prompt in made}) == 15
    assert made == prompts(job), "every policy trains the same"
