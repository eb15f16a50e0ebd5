"""What is put down of a run, and what goes again."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import count

import msgspec
import pytest

from rollout_sched import load_policy
from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.events import BatchRequested, InstanceJoined, WeightsPublished
from rollout_sched.core.model.records import RunFacts
from rollout_sched.live.driver import Driver
from rollout_sched.live.durable import records as facts
from rollout_sched.live.durable.recorder import StoreKeeper
from rollout_sched.live.durable.records import ONE, StoredTranscripts, decoded
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.trainer.samples import Prompt
from rollout_sched.store.store import Store
from tests.live.scripted import Scripted, until
from tests.store.simulated_disk import SimulatedDisk

PROMPT = Prompt("a", [1, 2], 1, 9)


class Keeping:
    """A keeper behind a driver, and what its store holds."""

    def __init__(self, folder, driver, **store):
        self.driver = driver
        self.broken = []
        store = Store(folder, **{"durable": "off", **store})
        scheduler = driver.pump.scheduler
        self.keeper = StoreKeeper(
            store, scheduler, driver.front.payloads, StoredTranscripts(store), self.broken.append
        )
        driver.pump.observers.append(self.keeper.observe)

    async def rows(self):
        await self.keeper.session.promise()
        return {f"{f.kind} {f.name}".strip() for f in self.keeper.store._database.facts()[0]} - {
            "store epoch"
        }


@asynccontextmanager
async def keeping(tmp_path, **store):
    driver = Driver(load_policy("round_robin_sync").scheduler(1))
    kept = Keeping(tmp_path / "s", driver, **store)
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
            keeper.session.submitted(PROMPT, None)
            assert await kept.rows() == {"run", "group a", "prompt a"}
            driver.tell(BatchRequested())
            await instance.answer(0, [5, 6])
            while driver.view.run.batches == 0:
                await asyncio.sleep(0)
            assert await kept.rows() >= {"run", "prompt a", "delivered 0.0"}
            assert sorted(keeper.store.owners()) == ["p:a", "r:a/0"]
            keeper.session.acknowledged(0)
            assert not await kept.rows() & {"group a", "prompt a", "delivered 0.0"}
            assert keeper.store.owners() == []
            assert not kept.broken

    asyncio.run(scene())


def test_what_cannot_be_put_down_breaks_the_scheduler(tmp_path):
    async def scene():
        async with keeping(tmp_path) as kept:
            with pytest.raises(TypeError):
                kept.keeper.observe(0.0, InstanceJoined("i0", 1, 100), [Deliver(0, 0, None)])
            assert kept.broken

    asyncio.run(scene())


def test_the_model_is_written_when_it_changes(tmp_path):
    async def scene():
        async with keeping(tmp_path) as kept:
            fleet = kept.driver.fleet
            fleet.record = kept.keeper
            for number, model in enumerate(["", "m", "", "m"]):
                instance = Scripted(f"i{number}")
                instance.description = msgspec.structs.replace(instance.description, model=model)
                await kept.driver.add_instance(instance)
            await kept.keeper.session.promise()
            (row,) = [f for f in kept.keeper.store._database.facts()[0] if f.kind == facts.MODEL]
            assert row.value == b"m"

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


def test_a_version_that_nobody_says_survives_that_the_power_fails(tmp_path):
    """A trainer that brings weights around us need not publish them: what was seen is all there is,
    and who does not know of it takes them for another run's."""
    disk = SimulatedDisk(tmp_path / "s")
    copies = count()

    def left():
        after = disk.left_by_a_crash(tmp_path / f"after {next(copies)}", "rows")
        store = Store(after)
        try:
            run = store.facts(facts.RUN).get(ONE)
            return None if run is None else decoded(run, RunFacts).version
        finally:
            store.close()

    async def scene():
        async with keeping(tmp_path, durable="batch", disk=disk) as kept:
            kept.driver.tell(WeightsPublished(1, loads=False))
            await until(lambda: left() == 1)

    asyncio.run(scene())
