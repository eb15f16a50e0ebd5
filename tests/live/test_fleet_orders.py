"""The scheduler's orders to instances reach their supervisors, and the trainer those it is lent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollout_sched.core.model import actions as act
from rollout_sched.core.model.errors import CallerError
from rollout_sched.core.model.events import Woke
from rollout_sched.live.driver import Driver
from rollout_sched.live.settings import Settings
from tests.core.told import make_scheduler
from tests.live.scripted import Scripted, until


def play(scene: Callable[[Driver, Scripted], Any]) -> None:
    async def run() -> None:
        driver, instance = Driver(make_scheduler(), settings=Settings(poll_s=1000.0)), Scripted()
        await driver.add_instance(instance)
        instance.calls.clear()
        try:
            async with asyncio.timeout(10):
                await scene(driver, instance)
        finally:
            await driver.close()

    asyncio.run(run())


def test_each_has_its_supervisor_do_it() -> None:
    async def scene(driver: Driver, instance: Scripted) -> None:
        async def load(client: Any, version: int) -> None:
            instance.calls.append(f"load {version}")

        driver.fleet.loader = load
        orders = driver.lending.orders
        orders[act.Pause](act.Pause("i0", "keep", True))
        orders[act.UpdateWeights](act.UpdateWeights("i0", 0))
        orders[act.Resume](act.Resume("i0"))
        await until(lambda: "resume" in instance.calls)
        assert instance.calls == [("pause", "keep", True), "load 0", ("version", 0), "resume"]
        orders[act.Release](act.Release("i0"))
        assert driver.supervisors["i0"].membership.drained.is_set()

    play(scene)


def test_a_trainer_that_fails_at_what_it_is_lent_holds_up_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(driver: Driver, instance: Scripted) -> None:
        heard: list[str] = []

        def lent(name: str) -> None:
            heard.append(name)
            raise RuntimeError("no memory")

        driver.lending.on_lent, driver.lending.on_reclaimed = lent, heard.append
        driver.lending.orders[act.Lend](act.Lend("i0"))
        await until(lambda: heard)
        driver.lending.orders[act.Reclaim](act.Reclaim("i0"))
        driver.pump.tell(Woke())
        assert heard == ["i0", "i0"]
        driver.lending.take_back("i0")
        await until(lambda: "resume" in instance.calls)

    play(scene)
    assert "was lent to the trainer, whose callback failed" in caplog.text


def test_of_one_that_is_not_here_nothing_is_ordered() -> None:
    async def scene(driver: Driver, instance: Scripted) -> None:
        with pytest.raises(CallerError, match="no instance 'i9' here; there are i0"):
            driver.lending.orders[act.Resume](act.Resume("i9"))

    play(scene)
