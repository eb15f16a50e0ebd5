"""Rates of calls."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm.throttle import throttle


def test_no_more_calls_in_a_second_than_allowed():
    async def passed() -> int:
        allow = throttle(5, "control_rate")
        calls = [asyncio.create_task(allow()) for _ in range(20)]
        done, waiting = await asyncio.wait(calls, timeout=0.3)
        for call in waiting:
            call.cancel()
        return len(done)

    assert asyncio.run(passed()) == 5


@pytest.mark.parametrize("rate", [0, -1])
def test_a_rate_below_one_is_refused(rate):
    with pytest.raises(CallerError, match="control_rate is"):
        throttle(rate, "control_rate")
