"""Rates of calls."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.vllm.control import Throttle


def test_no_more_calls_in_a_second_than_allowed():
    async def passed() -> int:
        allow = Throttle(5, "control_rate")
        calls = [asyncio.create_task(allow.acquire()) for _ in range(20)]
        done, waiting = await asyncio.wait(calls, timeout=0.3)
        for call in waiting:
            call.cancel()
        return len(done)

    assert asyncio.run(passed()) == 5


@pytest.mark.parametrize("rate", [0, -1])
def test_a_rate_below_one_is_refused(rate):
    with pytest.raises(CallerError, match="control_rate is"):
        Throttle(rate, "control_rate")


def test_one_that_need_not_wait_counts_as_well():
    async def passed() -> list[bool]:
        allow = Throttle(2, "control_rate")
        await allow.acquire()
        return [allow.take(), allow.take()]

    assert asyncio.run(passed()) == [True, False]
