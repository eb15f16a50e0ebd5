"""What is put together over some turns of the loop, and written together."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from rollout_sched.live.durable.recorder import OpenTransaction
from rollout_sched.store.disk import Disk
from rollout_sched.store.errors import StoreBroken
from rollout_sched.store.store import Store


class BrokenDisk(Disk):
    broken = False

    def commit(self, database):
        if self.broken:
            raise OSError("no disk")
        super().commit(database)


class Opened:
    """A transaction, how often it was completed, and why it could not be written."""

    def __init__(self, folder, durable, disk):
        self.store = Store(folder, durable=durable, disk=disk)
        self.completed = 0
        self.errors = []
        self.open = OpenTransaction(self.store, self.complete, self.errors.append)

    def complete(self, changes):
        self.completed += 1
        changes.put("run", "completed", b"%d" % self.completed)

    def rows(self):
        return {fact.name: fact.value for fact in self.store._database.facts()[0]}


@asynccontextmanager
async def opened(folder, durable="batch", disk=None):
    transaction = Opened(folder, durable, disk)
    yield transaction
    await transaction.open.close()


@pytest.mark.parametrize("durable", ["batch", "event", "off"])
def test_what_happens_in_one_turn_is_written_once(tmp_path, durable):
    async def scene():
        async with opened(tmp_path, durable) as it:
            for number in range(10):
                it.open.changes.put("run", str(number), b"1")
                it.open.soon()
            while not it.completed:
                await asyncio.sleep(0)
            await it.open.promise()
            assert it.completed == 2
            assert it.rows() | {"completed": b"2"} == it.rows()
            assert set(map(str, range(10))) <= it.rows().keys()

    asyncio.run(scene())


def test_a_promise_is_about_all_that_came_before(tmp_path):
    async def scene():
        async with opened(tmp_path) as it:
            it.open.changes.put("run", "a", b"1")
            await it.open.promise()
            assert it.rows()["a"] == b"1"

    asyncio.run(scene())


def test_what_is_left_is_written_at_the_end(tmp_path):
    async def scene():
        async with opened(tmp_path) as it:
            it.open.changes.put("run", "a", b"1")

    asyncio.run(scene())
    store = Store(tmp_path)
    assert store.facts("run").keys() == {"a", "completed"}
    store.close()


def test_a_disk_that_breaks_is_told_in_the_loop(tmp_path):
    async def scene():
        disk = BrokenDisk()
        async with opened(tmp_path, disk=disk) as it:
            disk.broken = True
            with pytest.raises(StoreBroken):
                await it.open.promise()
            while not it.errors:
                await asyncio.sleep(0)
            (error,) = it.errors
            assert isinstance(error, StoreBroken)
            disk.broken = False

    asyncio.run(scene())
