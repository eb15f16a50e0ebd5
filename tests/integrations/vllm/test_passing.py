"""A call that the gateway makes on an instance's pool: named while it lasts, cut if need be."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.integrations.http.exchange import AnswerBroken
from rollout_sched.integrations.vllm.passing import Passing
from rollout_sched.live.ports import InstanceError


async def at_once() -> None:
    """A throttle that never waits."""


def test_it_is_known_by_its_order_while_it_lasts() -> None:
    async def scene() -> None:
        register: dict[str, Passing] = {}
        async with Passing("o", "cmpl-o-0", register, at_once):
            assert register["o"].engine_id == "cmpl-o-0"
        assert not register

    asyncio.run(scene())


def test_what_breaks_is_the_instances_fault() -> None:
    async def scene() -> None:
        register: dict[str, Passing] = {}
        with pytest.raises(InstanceError, match="reset"):
            async with Passing("o", "e", register, at_once):
                raise AnswerBroken("reset")
        assert not register

    asyncio.run(scene())


def test_a_cut_is_told_from_a_cancelled_caller() -> None:
    async def scene() -> None:
        register: dict[str, Passing] = {}

        async def call() -> None:
            async with Passing("o", "e", register, at_once):
                await asyncio.sleep(60)

        cut, cancelled = asyncio.create_task(call()), None
        await asyncio.sleep(0)
        register["o"].cut()
        with pytest.raises(InstanceError, match="no abort"):
            await cut
        cancelled = asyncio.create_task(call())
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert not register

    asyncio.run(scene())


def test_a_call_that_still_waits_its_turn_is_forgotten_when_cancelled() -> None:
    async def scene() -> None:
        register: dict[str, Passing] = {}

        async def never() -> None:
            await asyncio.sleep(60)

        async def call() -> None:
            async with Passing("o", "e", register, never):
                raise AssertionError("its turn never came")

        waiting = asyncio.create_task(call())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not register

    asyncio.run(scene())
