"""Scheduling by a gateway: who else may answer at its address."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout_sched.client import (
    ForgottenPrompts,
    GatewayError,
    LeaseEnded,
    Prompt,
    Reload,
    RolloutScheduler,
)
from rollout_sched.client.remote import calls
from rollout_sched.core.errors import CallerError
from rollout_sched.live.ports import OnTokens, Order, Output
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from rollout_sched.simulators.replay.scenario import load_scenario
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.live.scripted import until

NAME = "http://a:1"
WEIGHTS = Reload("/{version}", visible_here=False)


def prompt(uid: str) -> Prompt:
    return Prompt(uid, [1, 2], 1, 9)


async def test_a_vllm_server_is_named(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer(EngineSettings(load_scenario("tiny-cpu-2").instance, speed=1.0))
    port = await server.start("127.0.0.1", 0)
    try:
        with pytest.raises(CallerError, match="is a vLLM server, not a gateway"):
            await RolloutScheduler.connect(f"http://127.0.0.1:{port}").__aenter__()
    finally:
        await server.close()


@pytest.mark.parametrize("status", [200, 404])
async def test_something_else_is_said_to_be_none(status: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, text="<html>")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app, host="127.0.0.1") as server:
        with pytest.raises(CallerError, match="is not a gateway of rollout-sched"):
            await RolloutScheduler.connect(str(server.make_url("/"))).__aenter__()


async def test_a_server_without_http_is_an_error() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"-ERR unknown command\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(CallerError, match="is not a gateway"):
            await RolloutScheduler.connect(f"http://127.0.0.1:{port}").__aenter__()


async def test_nobody_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "RETRY_S", 0.001)
    with pytest.raises(GatewayError) as caught:
        await RolloutScheduler.connect("http://127.0.0.1:1").__aenter__()
    assert "127.0.0.1" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len([r for r in caplog.records if "retrying for" in r.message]) == 1


def test_the_address_of_a_models_clients_is_named() -> None:
    with pytest.raises(CallerError, match="leave out /v1"):
        RolloutScheduler.connect("http://127.0.0.1:8000/v1/")


async def test_unsendable_prompt_is_a_caller_error() -> None:
    async with (
        House(Upstream()) as house,
        RolloutScheduler.connect(house.service.url) as rollouts,
    ):
        with pytest.raises(CallerError, match="cannot be sent to a gateway"):
            await rollouts.submit([Prompt("a", [1], 1, 9, extra={"mine": object()})])


class TestRestarts:
    """Of a gateway that remembers nothing."""

    async def test_forgotten_prompts_are_named_and_may_be_submitted_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(calls, "RETRY_S", 0.05)
        first, second = Upstream(NAME), Upstream(NAME)
        async with House(first) as house:
            url = house.service.url
            rollouts = await RolloutScheduler.connect(url).__aenter__()
            await rollouts.submit([prompt("a"), prompt("b"), prompt("c")])
            asking = asyncio.create_task(rollouts.next_batch())
            await first.answer(0, [5])
            batch = await asking
            assert (batch.number, list(batch.groups())) == (0, ["a"])
        async with House(second, port=int(url.rsplit(":", 1)[1])):
            with pytest.raises(ForgottenPrompts) as caught:
                await rollouts.next_batch()
            assert caught.value.uids == ["b", "c"]
            await rollouts.submit([prompt(uid) for uid in caught.value.uids])
            asking = asyncio.create_task(rollouts.next_batch())
            await second.answer(0, [6])
            batch = await asking
            # It counts from 0 again, and what we had of the earlier one is not taken for it.
            assert (batch.number, list(batch.groups())) == (0, ["b"])
            await rollouts.__aexit__()

    async def test_where_nothing_was_waited_for_nothing_is_forgotten(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(calls, "RETRY_S", 0.05)
        second = Upstream(NAME)
        async with House(Upstream(NAME)) as house:
            url = house.service.url
            rollouts = await RolloutScheduler.connect(url).__aenter__()
        async with House(second, port=int(url.rsplit(":", 1)[1])):
            asking = asyncio.create_task(rollouts.next_batch())
            await until(lambda: "the gateway was restarted" in caplog.text)
            await rollouts.submit([prompt("a")])
            await second.answer(0, [6])
            batch = await asking
            assert list(batch.groups()) == ["a"]
            await rollouts.__aexit__()


@pytest.mark.parametrize("dies", [False, True])
async def test_every_answer_is_lost_once(
    dies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documented loop ends all the same, with each group in one batch, though the gateway (with
    a store) dies before each answer, and the trainer starts again from its checkpoint."""
    monkeypatch.setattr(calls, "RETRY_S", 0.001)
    prompts = [prompt(uid) for uid in "abc"]
    once, lost = calls.TrainerClient.once, set()
    async with AsyncExitStack() as houses:
        house = await houses.enter_async_context(House(Answering(NAME), store=tmp_path))
        url = house.service.url

        async def lose(self: Any, method: str, path: str, data: bytes) -> tuple[int, bytes]:
            answer = await once(self, method, path, data)
            if (path, data) in lost or method == "GET":
                return answer
            lost.add((path, data))
            if dies:
                await houses.pop_all().aclose()
                port = int(url.rsplit(":", 1)[1])
                await houses.enter_async_context(House(Answering(NAME), store=tmp_path, port=port))
            raise GatewayError("lost")

        monkeypatch.setattr(calls.TrainerClient, "once", lose)
        trained, checkpoint = [], None
        for _ in range(len(prompts)):
            lost.clear()
            async with RolloutScheduler.connect(url) as rollouts:
                if checkpoint is not None:
                    rollouts.acknowledge(checkpoint.number)
                    await rollouts.publish_weights(checkpoint.version + 1, WEIGHTS)
                await rollouts.submit(prompts)
                await rollouts.close_submissions()
                batch = await rollouts.next_batch()
                assert batch is not None
                checkpoint = batch
                trained += batch.groups()
                await rollouts.publish_weights(batch.version + 1, WEIGHTS)
        assert trained == ["a", "b", "c"]
        async with RolloutScheduler.connect(url) as rollouts:
            rollouts.acknowledge(2)
            assert await rollouts.next_batch() is None
            assert await rollouts.submit(prompts) == ["a", "b", "c"]


class Answering(Upstream):
    """Answers at once."""

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
        return Output([5], None, "stop", ())

    async def collective_rpc(self, *call: Any) -> None:
        """Loaded at once."""


class TestSeveralTrainers:
    async def test_one_that_trains_keeps_its_batch_and_one_that_dies_does_not(self) -> None:
        """It trains in the event loop, which stands still meanwhile."""
        instance = Upstream(NAME)
        async with House(instance, live={"lease_s": 0.6}) as house:
            url = house.service.url
            dead = RolloutScheduler.connect(url, trainer="dead")
            async with RolloutScheduler.connect(url, trainer="alive") as alive:
                await dead.__aenter__()
                await alive.submit([prompt("a"), prompt("b")])
                asking = [asyncio.create_task(one.next_batch()) for one in (dead, alive)]
                for number in range(2):
                    await instance.answer(number, [5])
                first, second = await asyncio.gather(*asking)
                assert (first.number, second.number) == (0, 1)
                leases = house.service.live.trainer.batches.leases
                ends = leases._leases[1].until
                await until(lambda: leases._leases[1].until > ends, 20)  # it is beating
                dead._heartbeat.close()
                asking = asyncio.create_task(alive.next_batch())
                await asyncio.wait_for(asking, 20)
                assert asking.result().number == 0
                with pytest.raises(LeaseEnded, match="trainer 'alive' has it now"):
                    await dead.next_batch()
                await alive.submit([prompt("c")])
                asking = asyncio.create_task(dead.next_batch())
                await instance.answer(2, [5])
                assert list((await asking).groups()) == ["c"]
            await dead.__aexit__()

    async def test_prompts_that_others_have_trained_are_not_forgotten(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who submits is not told to submit again what another trainer has taken."""
        monkeypatch.setattr(calls, "RETRY_S", 0.05)
        first, second = Upstream(NAME), Upstream(NAME)
        async with House(first, store=tmp_path / "s") as house:
            url = house.service.url
            submits = await RolloutScheduler.connect(url, trainer="submits").__aenter__()
            takes = await RolloutScheduler.connect(url, trainer="takes").__aenter__()
            await submits.submit([prompt("a")])
            asking = asyncio.create_task(takes.next_batch())
            await first.answer(0, [5])
            await asking
            asking = asyncio.create_task(takes.next_batch())
            await until(lambda: not house.service.live.trainer.submissions._delivered)
            asking.cancel()
        async with House(second, store=tmp_path / "s", port=int(url.rsplit(":", 1)[1])):
            asking = asyncio.create_task(submits.next_batch())
            await submits.submit([prompt("b")])
            await second.answer(0, [6])
            assert list((await asking).groups()) == ["b"]
            for one in (submits, takes):
                await one.__aexit__()
