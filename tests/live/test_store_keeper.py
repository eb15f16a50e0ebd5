"""What is put down of a run, and what goes again."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from rollout_sched import load_policy
from rollout_sched.core.events import BatchRequested, InstanceJoined
from rollout_sched.live.driver import Driver
from rollout_sched.live.leases import LeaseFacts
from rollout_sched.live.payloads import TokenPayload
from rollout_sched.live.samples import LostGroup, Prompt
from rollout_sched.live.store_keeper import StoreKeeper
from rollout_sched.live.stored_transcripts import StoredTranscripts
from rollout_sched.store.store import Store
from tests.live.scripted import Scripted

PROMPT = Prompt("a", [1, 2], 1, 9)


class Keeping:
    """A keeper behind a driver, and what its store holds."""

    def __init__(self, folder, driver):
        self.driver = driver
        self.broken = []
        store = Store(folder, durable="off")
        scheduler = driver.pump.scheduler
        self.keeper = StoreKeeper(
            store, scheduler, driver.payloads, StoredTranscripts(store), self.broken.append
        )
        driver.pump.observers.append(self.keeper.observe)

    async def rows(self):
        await self.keeper.promise()
        return {f"{f.kind} {f.name}".strip() for f in self.keeper.store._database.facts()[0]} - {
            "store epoch"
        }


@asynccontextmanager
async def keeping(tmp_path):
    driver = Driver(load_policy("round_robin_sync").scheduler(1))
    kept = Keeping(tmp_path / "s", driver)
    try:
        yield kept
    finally:
        await driver.close()
        await kept.keeper.close()


def test_a_group_leaves_nothing_behind_but_counters(tmp_path):
    async def scene():
        async with keeping(tmp_path) as kept:
            driver, keeper, instance = kept.driver, kept.keeper, Scripted()
            await driver.add_instance(instance)
            driver.submit_group(PROMPT.submitted, lambda index: TokenPayload([1, 2], {}))
            keeper.submitted(PROMPT, None)
            assert await kept.rows() == {"run", "group a", "prompt a"}
            driver.tell(BatchRequested())
            await instance.answer(0, [5, 6])
            while driver.view.run.batches == 0:
                await asyncio.sleep(0)
            assert await kept.rows() >= {"run", "prompt a", "delivered 0.0"}
            assert sorted(keeper.store.owners()) == ["p:a", "r:a/0"]
            keeper.acknowledged(0)
            assert not await kept.rows() & {"group a", "prompt a", "delivered 0.0"}
            assert keeper.store.owners() == []
            assert not kept.broken

    asyncio.run(scene())


def test_a_failure_stays_until_the_batch_that_told_of_it_has_arrived(tmp_path):
    async def scene():
        async with keeping(tmp_path) as kept:
            kept.keeper.lost(LostGroup("f", "why"))
            assert "failed f" in await kept.rows()
            kept.keeper.lost(LostGroup("f", "why"), 3)
            kept.keeper.acknowledged(4)
            assert "failed f" in await kept.rows()
            kept.keeper.acknowledged(3)
            assert "failed f" not in await kept.rows()

    asyncio.run(scene())


def test_a_lease_stays_while_somebody_is_to_be_told_of_it(tmp_path):
    async def scene():
        async with keeping(tmp_path) as kept:
            kept.keeper.leased(3, LeaseFacts("b", ("a",)))
            assert "lease 3" in await kept.rows()
            kept.keeper.leased(3, None)
            assert "lease 3" not in await kept.rows()

    asyncio.run(scene())


def test_what_cannot_be_put_down_breaks_the_scheduler(tmp_path):
    async def scene():
        async with keeping(tmp_path) as kept:
            recorder, kept.keeper._recorder = kept.keeper._recorder, None
            with pytest.raises(AttributeError):
                kept.keeper.observe(0.0, InstanceJoined("i0", 1, 100), [])
            kept.keeper._recorder = recorder
            assert kept.broken

    asyncio.run(scene())


def test_direct_requests_are_not_stored(tmp_path):
    async def scene():
        async with keeping(tmp_path) as kept:
            driver, instance = kept.driver, Scripted()
            await driver.add_instance(instance)
            driver.submit(TokenPayload([1, 2], {}), 2, 9)
            await instance.answer(0, [5])
            assert await kept.rows() <= {"run", "recent"}
            assert kept.keeper.store.owners() == []

    asyncio.run(scene())
