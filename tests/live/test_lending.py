"""Instances are lent to a trainer: paused for it, reclaimed where nothing goes on, given back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.model import InstanceStatus
from rollout_sched.live.driver import Driver
from rollout_sched.live.settings import Settings
from rollout_sched.live.trainer.samples import Batch, Prompt
from rollout_sched.live.trainer.session import TrainerSession
from tests.core.told import make_scheduler
from tests.live.scripted import Scripted, until

LENT = InstanceStatus.LENT


class Trainer:
    """Notes what it gets."""

    def __init__(self) -> None:
        self.has: list[str] = []
        self.asked_for: list[str] = []
        self.fails = False

    def lent(self, instance: str) -> None:
        self.has.append(instance)
        if self.fails:
            raise RuntimeError("out of memory")

    def reclaimed(self, instance: str) -> None:
        self.asked_for.append(instance)


class Stage:
    """Two instances, a batch of three groups of one sample: i0 has a and c, i1 has b."""

    def __init__(self) -> None:
        self.instances = [Scripted("i0"), Scripted("i1")]
        self.scheduler = make_scheduler(
            3,
            batching={"use": "sync", "part_prompts": 1},
            lending={"use": "stage_fusion", "whole": 0.3, "slowdown": 9.0},
        )
        self.driver = Driver(self.scheduler, settings=Settings(poll_s=1000.0))
        self.borrower = Trainer()
        self.trainer = TrainerSession(self.driver, borrower=self.borrower)

    async def __aenter__(self) -> Stage:
        for instance in self.instances:
            await self.driver.add_instance(instance)
        self.trainer.submit([Prompt(uid, [1, 2], 1, 10) for uid in "abc"])
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.driver.close()
        self.scheduler.check_invariants()

    def ask(self, *, parts: bool = True, **arrived: Any) -> asyncio.Task[Batch | None]:
        return asyncio.create_task(self.trainer.next_batch(**arrived, parts=parts))

    def status(self, name: str) -> InstanceStatus:
        return self.scheduler.state.fleet.instances[name].status

    async def lend(self) -> None:
        """a is whole, and i0 makes way: c goes on on i1 with what it has."""
        asking = self.ask()
        await self.instances[0].answer(0, [7])
        part = await asking
        assert not part.last
        await self.instances[0].answer(1, [4, 5], "abort")
        order = await self.instances[1].order(1)
        assert list(order.token_ids) == [1, 2, 4, 5]
        await until(lambda: self.borrower.has)


async def load(client: Any, version: int) -> None:
    """Loaded at once."""


async def test_instance_is_lent_and_returns() -> None:
    async with Stage() as stage:
        await stage.lend()
        assert stage.borrower.has == ["i0"]
        assert stage.instances[0].calls[-1] == ("pause", "keep", True)
        assert stage.status("i0") is LENT
        asking = stage.ask(acknowledged=0, part=0)
        await stage.instances[1].answer(0, [7])
        await asking
        asking = stage.ask(acknowledged=0, part=1)
        await stage.instances[1].answer(1, [6])
        last = await asking
        assert last.last
        (sample,) = last.samples
        assert (sample.response_ids, sample.versions) == ([4, 5, 6], [0, 0, 0])
        stage.driver.fleet.return_instance("i0")
        await until(lambda: stage.status("i0") is InstanceStatus.SERVING)
        assert stage.instances[0].calls[-1] == "resume"
        await stage.trainer.weights.publish(1, load, wait=True)


async def test_a_trainer_that_takes_whole_batches_is_lent_nothing() -> None:
    async with Stage() as stage:
        asking = stage.ask(parts=False)
        await stage.instances[0].answer(0, [7])
        await until(lambda: stage.driver.view.run.complete)
        assert stage.status("i0") is InstanceStatus.SERVING
        asking.cancel()


async def test_lent_instance_is_reclaimed_when_the_others_are_gone() -> None:
    async with Stage() as stage:
        await stage.lend()
        await stage.driver.remove_instance("i1")
        await until(lambda: stage.borrower.asked_for)
        assert stage.borrower.asked_for == ["i0"]
        stage.driver.fleet.return_instance("i0")
        order = await stage.instances[0].order(2)
        assert list(order.token_ids) == [1, 2]  # what i1 had of b is gone with it


async def test_returning_an_instance_not_lent_is_refused() -> None:
    async with Stage() as stage:
        for name in ("i0", "nobody"):
            with pytest.raises(CallerError, match="is not lent"):
                stage.driver.fleet.return_instance(name)


async def test_a_trainer_that_fails_keeps_what_it_was_lent() -> None:
    """It is for the trainer to give back; the instance has done nothing wrong."""
    async with Stage() as stage:
        stage.borrower.fails = True
        await stage.lend()
        assert stage.status("i0") is LENT
        stage.driver.fleet.return_instance("i0")
        await until(lambda: stage.status("i0") is InstanceStatus.SERVING)
