"""The connected processes generate a trainer's groups; nothing is lost when a process is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_sched import load_policy
from rollout_sched.link.front import RemoteFront
from rollout_sched.link.host import Hub
from rollout_sched.link.protocol import Recipes, read_welcome
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.ports import InstanceClient
from rollout_sched.live.settings import RunOptions, Settings
from rollout_sched.live.trainer.samples import Batch, Prompt, Tool
from tests.link.stage import run
from tests.link.wires import Shared
from tests.live.scripted import Scripted, until

PROMPT = Prompt("a", [1, 2], 1, 9)
SETTINGS = Settings(poll_s=1000.0, stream_s=0.01)


class Fleet:
    """A live scheduler with its hub, one instance, and fronts that get orders at once."""

    def __init__(self, store: Path | None = None) -> None:
        options = RunOptions(prompts_per_step=1, stream_every=2, store=store, seed=7)
        policy = load_policy("partial_rollout")
        self.live = LiveScheduler(policy, options, settings=SETTINGS)
        self.hub = Hub(self.live)
        self.instance = Scripted()
        self.fronts: dict[str, RemoteFront] = {}

    def join(self, name: str) -> RemoteFront:
        frames: list[bytes] = []
        welcome = read_welcome(self.hub.connect(name, lambda frame: take(frame)))
        instances: dict[str, InstanceClient] = {"i0": self.instance}
        front = self.fronts[name] = RemoteFront(
            name,
            welcome.epoch,
            welcome.epoch,
            send=lambda frame: self.hub.receive(name, frame),
            clients=Shared(instances),
            make=Recipes(welcome).factory,
            settings=welcome.settings,
            on_broken=lambda error: frames.append(repr(error).encode()),
        )
        take = front.receive
        return front

    def submit(self, *prompts: Prompt, tool: Tool | None = None) -> None:
        self.live.trainer.submit(prompts, tool)
        self.ask()

    def ask(self, acknowledged: int | None = None) -> None:
        self.asked = asyncio.ensure_future(self.live.trainer.next_batch(acknowledged))

    async def batch(self) -> Batch:
        batch = await self.asked
        assert batch is not None
        return batch


@asynccontextmanager
async def fleet(*names: str, store: Path | None = None) -> AsyncIterator[Fleet]:
    made = Fleet(store)
    await made.live.driver.add_instance(made.instance)
    for name in names:
        made.join(name)
    try:
        yield made
    finally:
        for front in made.fronts.values():
            await front.close()
        await made.live.close()


def test_groups_are_made_at_the_fronts_of_the_prompts_they_are_told() -> None:
    async def scene() -> None:
        async with fleet("f0", "f1") as made:
            made.submit(PROMPT, Prompt("b", [3], 1, 9))
            await until(lambda: len(made.instance.orders) == 2)
            assert [front["groups"] for front in made.hub.state().values()] == [1, 1]
            assert not len(made.live.driver.front.attempts), "no attempt is in flight here"
            assert made.live.state()["fronts"] == made.hub.state()
            await made.instance.answer(0, [5, 6])
            await made.instance.answer(1, [7])
            first = await made.batch()
            made.ask(first.number)
            second = await made.batch()
            assert {batch.samples[0].uid for batch in (first, second)} == {"a", "b"}
            assert [front["groups"] for front in made.hub.state().values()] == [0, 0]

    run(scene)


async def tool(turn: Any) -> None:
    return None


@pytest.mark.parametrize(("fronts", "with_tool"), [((), None), (("f0",), tool)])
def test_without_fronts_and_with_a_tool_they_are_made_here(
    fronts: tuple[str, ...], with_tool: Tool | None
) -> None:
    async def scene() -> None:
        async with fleet(*fronts) as made:
            made.submit(PROMPT, tool=with_tool)
            await until(lambda: len(made.live.driver.front.attempts) == 1)
            assert not any(front["groups"] for front in made.hub.state().values())

    run(scene)


def test_a_front_that_dies_costs_no_token_that_it_has_reported() -> None:
    async def scene() -> None:
        async with fleet("f0", "f1") as made:
            made.submit(PROMPT)
            await made.instance.stream(0, [5, 6])
            await until(lambda: made.live.driver.front.payloads.get("a/0") is not None)
            made.hub.disconnect("f0")
            order = await made.instance.order(1)
            assert order.token_ids == [1, 2, 5, 6]
            await made.instance.answer(1, [7])
            assert (await made.batch()).samples[0].response_ids == [5, 6, 7]

    run(scene)


def test_a_store_has_what_fronts_have_streamed(tmp_path: Path) -> None:
    async def first() -> None:
        async with fleet("f0", store=tmp_path / "s") as made:
            made.submit(PROMPT)
            await made.instance.stream(0, [5, 6])
            await until(lambda: made.live.driver.front.payloads.get("a/0") is not None)

    async def second() -> None:
        async with fleet("f0", store=tmp_path / "s") as made:
            made.ask()
            order = await made.instance.order(0)
            assert order.token_ids == [1, 2, 5, 6]
            await made.instance.answer(0, [7])
            assert (await made.batch()).samples[0].response_ids == [5, 6, 7]

    run(first)
    run(second)


def test_one_that_comes_again_takes_the_place_of_the_other() -> None:
    async def scene() -> None:
        async with fleet("f0") as made:
            before = made.fronts["f0"]
            made.submit(PROMPT)
            await made.instance.order(0)
            await before.close()
            made.join("f0")
            await made.instance.answer(1, [7])
            assert (await made.batch()).samples[0].response_ids == [7]
            made.hub.receive("nobody", b"a frame of a front that has gone")

    run(scene)


def test_every_start_has_an_epoch_of_its_own(tmp_path: Path) -> None:
    epochs: set[str] = set()

    async def scene() -> None:
        async with fleet(store=tmp_path / "s") as made:
            epochs.add(made.hub.epoch)

    run(scene)
    run(scene)
    assert len(epochs) == 2


@pytest.mark.parametrize("policy", ["partial_rollout"])
def test_a_front_is_told_what_it_needs(policy: str) -> None:
    async def scene() -> None:
        async with fleet() as made:
            welcome = read_welcome(made.hub.connect("f0", lambda frame: None))
            assert (welcome.epoch, welcome.settings) == (made.hub.epoch, SETTINGS)
            assert (welcome.stream_every, welcome.seed) == (2, 7)
            assert welcome.keeps_partial

    run(scene)
