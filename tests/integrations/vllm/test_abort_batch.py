"""Aborts that are wanted together travel together."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.integrations.vllm.control import Throttle
from rollout_sched.integrations.vllm.http_instance import AbortBatch
from rollout_sched.live.ports import InstanceError, InstanceGone
from tests import virtual_net


async def test_aborts_of_one_tick_are_one_call():
    sent = []

    async def send(ids):
        sent.append(ids)

    batch = AbortBatch(Throttle(100, "rate"), send)
    await asyncio.gather(*(batch.add(str(i)) for i in range(5)))
    await batch.add("5")
    assert sent == [["0", "1", "2", "3", "4"], ["5"]]


def test_an_exception_of_the_call_reaches_all_callers():
    async def errors():
        async def send(ids):
            raise InstanceError("no")

        batch = AbortBatch(Throttle(100, "rate"), send)
        return await asyncio.gather(batch.add("a"), batch.add("b"), return_exceptions=True)

    assert [type(error) for error in virtual_net.run(errors())] == [InstanceError, InstanceError]


async def test_a_cancelled_caller_cancels_no_other():
    gate = asyncio.Event()
    calls = []

    async def send(ids):
        await gate.wait()
        calls.append(ids)

    batch = AbortBatch(Throttle(100, "rate"), send)
    first, second = (asyncio.create_task(batch.add(name)) for name in "ab")
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.set()
    await second
    assert calls == [["a", "b"]]


@pytest.mark.real_time
async def test_a_call_to_an_unreachable_server_ends_with_its_instance():
    """It went on for as long as it takes to connect, after all else had been closed."""

    async def send(ids):
        await asyncio.Event().wait()

    batch = AbortBatch(Throttle(100, "rate"), send)
    waiting = asyncio.create_task(batch.add("a"))
    await asyncio.sleep(0.01)
    await batch.close()
    with pytest.raises(InstanceGone, match="closed before it answered an abort"):
        await waiting
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.real_time
async def test_a_closed_batch_sends_nothing():
    """Who had several to abort went on with the next one after the instance was closed."""
    sent = []

    async def send(ids):
        sent.append(ids)

    batch = AbortBatch(Throttle(100, "rate"), send)
    await batch.close()
    with pytest.raises(InstanceGone, match="closed"):
        await batch.add("a")
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not sent
