"""New weights: one line of versions, in the store before they count."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.live.driver import Driver
from rollout_sched.live.trainer.session import WeightPublisher
from tests.core.told import make_scheduler
from tests.live.scripted import Scripted, until


class Stored:
    def __init__(self):
        self.published_ = []
        self.promised = asyncio.Event()

    def published(self, version, loader):
        self.published_.append((version, loader))

    async def promise(self):
        await self.promised.wait()


async def load(client, version):
    """Loaded at once."""


def test_who_publishes_next_says_what_is_newer_whoever_it_is():
    async def scene():
        driver = Driver(make_scheduler(1))
        weights = WeightPublisher(driver, None)
        await weights.publish(1, load, None, wait=False)
        assert weights.newest == 1
        with pytest.raises(CallerError, match="versions must increase"):
            await weights.publish(1, load, None, wait=False)
        await driver.close()

    asyncio.run(scene())


def test_it_is_in_the_store_before_it_is_answered():
    async def scene():
        driver, stored = Driver(make_scheduler(1)), Stored()
        weights = WeightPublisher(driver, stored)
        with pytest.raises(CallerError, match="a coroutine cannot be stored"):
            await weights.publish(1, load, None, wait=False)
        assert weights.newest == 0
        publishing = asyncio.create_task(weights.publish(1, load, b"how", wait=False))
        await until(lambda: stored.published_ == [(1, b"how")])
        assert not publishing.done()
        stored.promised.set()
        await publishing
        await driver.close()

    asyncio.run(scene())


def test_it_is_loaded_when_all_who_are_here_have_it():
    async def scene():
        driver = Driver(make_scheduler(1))
        weights = WeightPublisher(driver, None)
        assert not weights.has_loaded(0), "nobody is here"
        await driver.add_instance(Scripted())
        assert weights.has_loaded(0)
        await weights.publish(1, load, None, wait=True)
        assert weights.has_loaded(1)
        await driver.close()

    asyncio.run(scene())
