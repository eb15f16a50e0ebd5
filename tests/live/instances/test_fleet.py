"""Instances come, join, are lost and go, and each is here once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.events import (
    Event,
    GroupSubmitted,
    InstanceJoined,
    InstanceLeaving,
    InstanceLost,
)
from rollout_sched.live.driver import Driver
from rollout_sched.live.instances.fleet import FleetAttempts
from rollout_sched.live.ports import InstanceError
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.settings import Settings
from tests.core.told import make_scheduler
from tests.live.scripted import Scripted, until


class Stage:
    def __init__(self, **settings: Any) -> None:
        self.told: list[Event] = []
        self.driver = Driver(
            make_scheduler(),
            settings=Settings(poll_s=1000.0, **settings),
            observers=[lambda now, event, actions: self.told.append(event)],
        )
        self.fleet = self.driver.fleet

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.told]


class RunElsewhere:
    """Attempts that somebody else runs: who lost them says so later."""

    def __init__(self, attempts: FleetAttempts) -> None:
        self._attempts = attempts
        self.lost: list[Callable[[], None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attempts, name)

    def lose(self, instance: str, tell: Callable[[], None]) -> None:
        self.lost.append(tell)


@asynccontextmanager
async def staged(**settings: Any) -> AsyncIterator[Stage]:
    stage = Stage(**settings)
    try:
        async with asyncio.timeout(10):
            yield stage
    finally:
        await stage.driver.close()


async def test_instance_joins_once_and_leaves() -> None:
    async with staged() as stage:
        instance = Scripted()
        await stage.fleet.add(instance, patient=False)
        assert stage.fleet.max_model_len == 10_000
        with pytest.raises(CallerError, match="here already"):
            await stage.fleet.add(Scripted(), patient=False)
        await stage.fleet.remove("i0", drain=True)
        assert instance.closed
        assert not stage.fleet.supervisors
        assert stage.fleet.max_model_len == 0
        kinds = [InstanceJoined, InstanceLeaving, InstanceLost]
        assert [type(event) for event in stage.told] == kinds
        with pytest.raises(CallerError, match="no instance 'i0' here"):
            await stage.fleet.remove("i0", drain=False)


async def test_instance_removed_twice_leaves_once() -> None:
    """Who runs attempts elsewhere is waited for, and it may have gone and come again meanwhile."""

    async with staged() as stage:
        await stage.fleet.add(Scripted(), patient=False)
        elsewhere = RunElsewhere(stage.fleet.attempts)
        stage.fleet.attempts = elsewhere
        first = asyncio.ensure_future(stage.fleet.remove("i0", drain=False))
        second = asyncio.ensure_future(stage.fleet.remove("i0", drain=False))
        while len(elsewhere.lost) < 2:
            await asyncio.sleep(0.001)
        elsewhere.lost[0]()
        await first
        await stage.fleet.add(Scripted(), patient=False)
        elsewhere.lost[1]()
        await second
        assert list(stage.fleet.supervisors) == ["i0"]


async def test_unusable_instance_is_not_added() -> None:
    async with staged() as stage:
        instance = Scripted()
        instance.dead = True
        with pytest.raises(InstanceError):
            await stage.fleet.add(instance, patient=False)
        assert not stage.fleet.supervisors
        assert instance.closed
        assert await stage.fleet.add(Scripted(), patient=True) is not None


async def test_instance_paused_by_an_earlier_run_is_resumed() -> None:
    async with staged() as stage:
        stage.fleet.paused_before = {"i0"}
        await stage.fleet.add(Scripted("i0"), patient=False)
        await stage.fleet.add(Scripted("i1"), patient=False)
        assert not stage.fleet.paused_before
        assert sorted(stage.fleet.supervisors) == ["i0", "i1"]


async def test_loss_is_reported_once() -> None:
    async with staged() as stage:
        await stage.fleet.add(Scripted(), patient=False)
        stage.fleet.lose("i0", "it died")
        stage.fleet.lose("i0", "it died")
        assert stage.kinds().count("InstanceLost") == 1


async def test_loading_needs_a_loader() -> None:
    async def load(client: Any, version: int) -> None: ...

    async with staged() as stage:
        assert not stage.fleet.can_load
        stage.fleet.loader = load
        assert stage.fleet.can_load


async def test_another_model_does_not_replace_an_absent_instance() -> None:
    """It did where all others were away, and the run went on with another model."""

    async with staged() as stage:
        first, second = Scripted("i0"), Scripted("i1")
        first.describes(model="m")
        second.describes(model="other")
        await stage.driver.add_instance(first)
        first.dead = True
        home = stage.driver.supervisors["i0"]
        await until(lambda: home.health.check_now() or not home.joined)
        with pytest.raises(InstanceError, match="serves other, but the other instances serve m"):
            await stage.driver.add_instance(second)
        first.dead = False
        first.describes(model="other")
        await until(lambda: home.health.check_now() or home.joined)
        await stage.driver.add_instance(second)
        assert stage.kinds() == ["InstanceJoined", "InstanceLost", *2 * ["InstanceJoined"]]


@pytest.mark.parametrize("one_precision", [False, True])
async def test_a_mixed_fleet_is_noted_or_refused(one_precision: bool, caplog: Any) -> None:
    """One that does not report its precision joins with any other."""
    async with staged(one_precision=one_precision) as stage:
        for number, precision in enumerate(["bfloat16", "bfloat16", "", "fp8"]):
            instance = Scripted(f"i{number}")
            instance.describes(precision=precision)
            if precision == "fp8" and one_precision:
                with pytest.raises(InstanceError, match="computes in fp8, but i0 in bfloat16"):
                    await stage.driver.add_instance(instance)
            else:
                await stage.driver.add_instance(instance)
        assert stage.kinds() == ["InstanceJoined"] * (3 if one_precision else 4)
        mixed = [line for line in caplog.messages if "two policies" in line]
        assert len(mixed) == (not one_precision)
        await stage.driver.remove_instance("i0")
        await stage.driver.remove_instance("i1")
        other = Scripted("i4")
        other.describes(precision="fp8, kv fp8_e4m3")
        if one_precision:
            await stage.driver.add_instance(other)


async def test_started_run_keeps_its_model() -> None:
    """A fleet that came back whole with another model went on with the samples of the first."""

    async with staged() as stage:
        only = Scripted()
        only.describes(model="m")
        await stage.driver.add_instance(only)
        stage.driver.submit_group(
            GroupSubmitted("a", 1, 2, 9), lambda index: TokenPayload([1, 2], {})
        )
        only.dead = True
        home = stage.driver.supervisors["i0"]
        await until(lambda: home.health.check_now() or not home.joined)
        only.dead = False
        only.describes(model="other")
        await until(lambda: home.health.check_now() or "samples of this run" in home.reason)
        assert not home.joined
        await stage.driver.remove_instance("i0")
        with pytest.raises(InstanceError, match=r"serves other, but the samples of this run .* m:"):
            await stage.driver.add_instance(only)
        only.describes(model="m")
        await stage.driver.add_instance(only)
        assert stage.kinds().count("InstanceJoined") == 2
