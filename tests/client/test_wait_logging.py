"""What is waited for is said: once, and again when it changes."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.client import rollout_scheduler as module
from rollout_sched.client.rollout_scheduler import log_while_waiting
from rollout_sched.core.errors import CallerError
from tests.live.scripted import until


def test_each_reason_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    answers = iter(["", "no prompts", "no prompts", "", CallerError("gone"), "no prompts"])
    asked = []

    async def why() -> str:
        asked.append(1)
        answer = next(answers, "")
        if isinstance(answer, CallerError):
            raise answer
        return answer

    async def scene() -> None:
        async with log_while_waiting("a batch", why):
            await until(lambda: len(asked) > 8)
        before = len(asked)
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(asked) == before, "nobody waits any more"

    asyncio.run(scene())
    said = [
        record.getMessage().removeprefix("still waiting for a batch: ") for record in caplog.records
    ]
    assert said == ["no prompts", "gone", "no prompts"]
