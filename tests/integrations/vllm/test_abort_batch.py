"""Aborts that are wanted together travel together."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.integrations.vllm.control import Throttle
from rollout_sched.integrations.vllm.http_instance import AbortBatch
from rollout_sched.live.ports import InstanceError, InstanceGone


class Sending:
    """What is sent, once `gate` opens."""

    def __init__(self):
        self.sent = []
        self.gate = asyncio.Event()
        self.batch = AbortBatch(Throttle(100, "rate"), self.send)

    async def send(self, ids):
        await self.gate.wait()
        self.sent.append(ids)


async def test_aborts_of_one_tick_are_one_call():
    sending = Sending()
    sending.gate.set()
    await asyncio.gather(*(sending.batch.add(str(i)) for i in range(5)))
    await sending.batch.add("5")
    assert sending.sent == [["0", "1", "2", "3", "4"], ["5"]]


async def test_an_exception_of_the_call_reaches_all_callers():
    async def send(ids):
        raise InstanceError("no")

    batch = AbortBatch(Throttle(100, "rate"), send)
    errors = await asyncio.gather(batch.add("a"), batch.add("b"), return_exceptions=True)
    assert [type(error) for error in errors] == [InstanceError, InstanceError]


async def test_a_cancelled_caller_cancels_no_other():
    sending = Sending()
    first, second = (asyncio.create_task(sending.batch.add(name)) for name in "ab")
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    sending.gate.set()
    await second
    assert sending.sent == [["a", "b"]]


@pytest.mark.real_time
async def test_a_closed_batch_ends_its_call_and_sends_nothing_more():
    """A call to an unreachable server went on for as long as it takes to connect."""
    sending, mine = Sending(), asyncio.all_tasks()
    waiting = asyncio.create_task(sending.batch.add("a"))
    await asyncio.sleep(0.01)
    await sending.batch.close()
    with pytest.raises(InstanceGone, match="closed before it answered an abort"):
        await waiting
    with pytest.raises(InstanceGone, match="closed"):
        await sending.batch.add("b")
    assert asyncio.all_tasks() == mine
    assert not sending.sent
