"""Batches over a connection that may break: none is lost, and none comes twice after its ack."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from rollout_sched.live.batch_delivery import BatchDelivery, NotYet
from rollout_sched.live.samples import Batch
from rollout_sched.live.trainer_session import TrainerSession


class Trainer:
    """Hands out what a test puts there."""

    def __init__(self) -> None:
        self.batches: asyncio.Queue[Batch | None] = asyncio.Queue()
        self.asked = 0

    async def next_batch(self) -> Batch | None:
        self.asked += 1
        return await self.batches.get()

    def put(self, number: int) -> None:
        self.batches.put_nowait(Batch(number, 0, []))


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 10))


def made() -> tuple[Trainer, BatchDelivery]:
    trainer = Trainer()
    return trainer, BatchDelivery(cast(TrainerSession, trainer))


async def number(delivery: BatchDelivery, ack: int | None, timeout_s: float = 1.0) -> int | None:
    """Of the next batch; None for "not yet"."""
    try:
        batch = await delivery.next(ack, timeout_s)
    except NotYet:
        return None
    assert batch is not None
    return batch.number


@pytest.mark.parametrize("wrong", [None, -1, 1, 99, 2**70])
def test_a_wrong_acknowledgement_brings_the_same_batch_again(wrong: int | None) -> None:
    async def scene() -> None:
        trainer, delivery = made()
        trainer.put(0)
        trainer.put(1)
        assert await number(delivery, None) == 0
        assert await number(delivery, wrong) == 0
        assert await number(delivery, 0) == 1
        assert await number(delivery, 0) == 1  # the acknowledgement of the first, once more

    run(scene())


def test_two_trainers_at_once() -> None:
    async def scene() -> None:
        trainer, delivery = made()
        asking = [asyncio.create_task(number(delivery, None)) for _ in range(2)]
        await asyncio.sleep(0)
        trainer.put(0)
        assert await asyncio.gather(*asking) == [0, 0]
        # Both acknowledge it: the second is no acknowledgement of the batch after.
        asking = [asyncio.create_task(number(delivery, 0)) for _ in range(2)]
        await asyncio.sleep(0)
        trainer.put(1)
        trainer.put(2)
        assert await asyncio.gather(*asking) == [1, 1]
        assert await number(delivery, 0) == 1
        assert await number(delivery, 1) == 2
        assert trainer.asked == 3

    run(scene())


@pytest.mark.parametrize("turns", range(8))
def test_a_timeout_at_the_moment_of_delivery(turns: int) -> None:
    """Whichever is first: the batch comes now, or with the next question."""

    async def scene() -> None:
        trainer, delivery = made()
        asking = asyncio.create_task(number(delivery, None, timeout_s=0))
        for _ in range(turns):
            await asyncio.sleep(0)
        trainer.put(0)
        assert await asking in (None, 0)
        assert await number(delivery, None) == 0
        assert trainer.asked == 1

    run(scene())


@pytest.mark.parametrize("turns", range(8))
def test_who_hangs_up_at_the_moment_of_delivery(turns: int) -> None:
    async def scene() -> None:
        trainer, delivery = made()
        asking = asyncio.create_task(number(delivery, None))
        await asyncio.sleep(0)
        trainer.put(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert await number(delivery, None) == 0
        assert trainer.asked == 1

    run(scene())


def test_the_end_is_told_as_often_as_it_is_asked() -> None:
    async def scene() -> None:
        trainer, delivery = made()
        trainer.batches.put_nowait(None)
        for ack in (None, 0, 7):
            assert await delivery.next(ack, 1.0) is None

    run(scene())


def test_after_the_end_of_the_gateway_there_is_nothing_yet() -> None:
    async def scene() -> None:
        _, delivery = made()
        asking = asyncio.create_task(number(delivery, None))
        await asyncio.sleep(0)
        await delivery.close()
        assert await asking is None
        for ack in (None, 0):
            assert await number(delivery, ack, timeout_s=0) is None

    run(scene())
