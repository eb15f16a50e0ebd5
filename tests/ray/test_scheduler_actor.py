"""The scheduler's actor: its answers, and that it continues after its process was killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from ray.cluster_utils import Cluster

from rollout_sched.client import Prompt
from rollout_sched.client.remote import NextBatch
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.ray import cluster as clusters
from rollout_sched.integrations.ray import on_ray
from rollout_sched.integrations.ray.deployment import Deployment
from rollout_sched.integrations.ray.scheduler_actor import HandedBatch
from tests.neighbours.fleet import Program
from tests.ray.conftest import PATIENCE_S, prompts

DEPLOYMENT = Deployment(name="alone", fronts=0)


async def process_of(actor: Any) -> int:
    return int(await actor.__ray_call__.remote(lambda self: os.getpid()))


def test_what_it_answers_and_where_fronts_connect(cluster: Cluster, tmp_path: Path) -> None:
    async def scene() -> None:
        options = Options(policy="dplb", port=0, store=tmp_path / "store")
        facts = await clusters.start(options, DEPLOYMENT)
        assert facts.url.startswith("http://")
        actor = await clusters.found(DEPLOYMENT)
        place, url = await actor.place.remote()
        assert url == facts.url
        assert place.port
        assert len(place.key) > 20
        status, body, epoch = await actor.call.remote("GET", "/rollout/v1/state", b"", "")
        assert status == 200
        assert msgspec.msgpack.decode(body)["epoch"] == epoch
        earlier = actor.micro_batches.options(num_returns=3)
        head, *parts = earlier.remote(NextBatch(), "an earlier epoch", 2)
        assert msgspec.msgpack.decode(await head, type=HandedBatch) == HandedBatch(epoch, "pending")
        assert [await part for part in parts] == [None, None]
        folder = await actor.__ray_call__.remote(lambda self: self._folder.name)
        assert await clusters.stop(DEPLOYMENT)
        assert not await clusters.stop(DEPLOYMENT)
        assert not Path(folder).exists()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_it_goes_on_from_its_store_when_its_process_is_killed(
    cluster: Cluster, servers: list[Program], tmp_path: Path
) -> None:
    async def scene() -> None:
        rollouts = on_ray(
            "one_step_off",
            [server.url for server in servers],
            name=DEPLOYMENT.name,
            fronts=0,
            prompts_per_step=8,
            store=tmp_path / "store",
        )
        async with rollouts:
            actor = await clusters.found(DEPLOYMENT)
            before = await process_of(actor)
            await rollouts.submit(prompts(8))
            waiting = asyncio.ensure_future(rollouts.next_batch())
            while not (await rollouts.state())["requests"]["in_flight"]:
                await asyncio.sleep(0.05)
            os.kill(before, signal.SIGKILL)
            batch = await waiting
            assert batch is not None
            assert set(batch.groups()) == {f"g{n}" for n in range(8)}
            assert await process_of(actor) != before
        assert await clusters.stop(DEPLOYMENT)

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_without_a_store_the_trainer_hears_of_what_is_forgotten(
    cluster: Cluster, servers: list[Program]
) -> None:
    from rollout_sched.client import ForgottenPrompts

    async def scene() -> None:
        urls = [server.url for server in servers]
        rollouts = on_ray("round_robin_sync", urls, name="forgetful", fronts=0)
        async with rollouts:
            await rollouts.submit([Prompt("g", [1, 2], 1, 9)])
            actor = await clusters.found(Deployment(name="forgetful"))
            os.kill(await process_of(actor), signal.SIGKILL)
            with pytest.raises(ForgottenPrompts) as caught:
                await rollouts.next_micro_batches(1)
            assert caught.value.uids == ["g"]
        assert await clusters.stop(Deployment(name="forgetful"))

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


@ray.remote(num_cpus=0)
class Mistaken:
    """An actor with the name of a server that is not one."""

    def url(self) -> str:
        return "http://two words"


def test_a_server_that_is_refused_is_no_instance_and_is_said(cluster: Cluster) -> None:
    async def scene() -> None:
        server = Mistaken.options(name="mistaken-0").remote()
        deployment = Deployment(name="refusing", fronts=0, servers="mistaken-*")
        await clusters.start(Options(policy="dplb", port=0), deployment)
        actor = await clusters.found(deployment)
        said: list[str] = []
        while not said:
            said = await actor.__ray_call__.remote(lambda self: [*self._servers[0]._said.values()])
            await asyncio.sleep(0.1)
        assert "printable ASCII" in said[0]
        assert await clusters.stop(deployment)
        ray.kill(server)

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
