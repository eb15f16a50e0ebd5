"""Between verl's workers and a scheduler: groups in, samples back by batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollout_sched.client import Batch, FailedGroup, GatewayError, Prompt, Sample
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.verl.coordinator import Coordinator
from rollout_sched.integrations.verl.groups import GroupFailed
from tests.integrations.samples import make_sample
from tests.live.scripted import until

RUNNING = {"is_prompt": True, "status": "running"}


def prompt(uid: str) -> Prompt:
    return Prompt(uid, [1, 2], samples=2, max_tokens=8)


class Rollouts:
    """A scheduler that delivers what it is told to; `asked` counts the questions for a batch."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.asked = 0
        self._batches: asyncio.Queue[Batch | Exception | None] = asyncio.Queue()

    async def submit(self, prompts: list[Prompt]) -> list[str]:
        again = [one.uid for one in prompts if one.uid in self.submitted]
        self.submitted += [one.uid for one in prompts]
        return again

    async def next_batch(self, *, parts: bool) -> Batch | None:
        assert parts
        self.asked += 1
        batch = await self._batches.get()
        if isinstance(batch, Exception):
            raise batch
        return batch

    def deliver(self, batch: Batch | Exception | None) -> None:
        self._batches.put_nowait(batch)


class World:
    """A coordinator at work before a scheduler and a TransferQueue that a test writes."""

    def __init__(self) -> None:
        self.rollouts = Rollouts()
        self.tags: dict[str, dict[str, Any]] = {}
        self.coordinator = Coordinator(self.rollouts, self._tags, groups_per_step=2, poll_s=0.001)

    async def _tags(self) -> dict[str, dict[str, Any]]:
        return self.tags

    async def ask(self, *uids: str) -> list[asyncio.Task[list[Sample]]]:
        tasks = []
        for uid in uids:
            self.tags[uid] = RUNNING
            tasks.append(asyncio.create_task(self.coordinator.samples(prompt(uid))))
        await until(lambda: set(uids) <= set(self.rollouts.submitted))
        return tasks


@pytest.fixture
@asynccontextmanager
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.coordinator.close()


async def test_groups_get_their_samples_in_the_order_of_their_indices(world: World) -> None:
    a, b = await world.ask("a", "b")
    world.rollouts.deliver(
        Batch(0, 0, [make_sample("b", 1), make_sample("a", 0), make_sample("b", 0)])
    )
    assert [one.index for one in await b] == [0, 1]
    assert [one.uid for one in await a] == ["a"]


async def test_parts_are_handed_out_as_they_come(world: World) -> None:
    a, b = await world.ask("a", "b")
    world.rollouts.deliver(Batch(0, 0, [make_sample("a", 0)], part=0, last=False))
    assert await a
    assert not b.done()
    world.rollouts.deliver(Batch(0, 0, [make_sample("b", 0)], part=1, last=True))
    assert await b


async def test_the_next_batch_is_asked_for_when_the_trainer_has_cleared_the_last(
    world: World,
) -> None:
    first = await world.ask("a", "b")
    world.rollouts.deliver(Batch(0, 0, [make_sample("a", 0), make_sample("b", 0)]))
    await asyncio.gather(*first)
    looks = world.rollouts.asked
    world.tags = {"a_0_0": {}, "b_0_0": {}, "c": RUNNING}  # it trains
    (c,) = await world.ask("c")
    world.rollouts.deliver(Batch(1, 1, [make_sample("c", 0)]))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert world.rollouts.asked == looks
    world.tags = {"c": RUNNING}
    assert await c


async def test_a_group_that_can_never_be_whole_fails_with_the_reason(world: World) -> None:
    (a,) = await world.ask("a")
    world.rollouts.deliver(Batch(0, 0, [], failed=[FailedGroup("a", "too long")]))
    with pytest.raises(GroupFailed, match="too long"):
        await a


async def test_a_group_that_was_delivered_before_fails(world: World) -> None:
    """Nothing would ever come for it."""
    world.rollouts.submitted.append("a")
    with pytest.raises(GroupFailed, match="delivered before"):
        await world.coordinator.samples(prompt("a"))


@pytest.mark.parametrize(
    ("end", "error"), [(GatewayError("it is away"), GatewayError), (None, CallerError)]
)
async def test_all_groups_fail_when_the_scheduler_ends(end, error, world: World) -> None:
    (a,) = await world.ask("a")
    world.coordinator.check()
    world.rollouts.deliver(end)
    with pytest.raises(error):
        await a
    with pytest.raises(error):
        world.coordinator.check()
    with pytest.raises(error):
        await world.coordinator.samples(prompt("b"))


async def test_a_group_is_waited_for_once(world: World) -> None:
    await world.ask("a")
    with pytest.raises(CallerError, match="already"):
        await world.coordinator.samples(prompt("a"))
