"""Fronts run on the intended nodes and answer clients."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import ray
from ray.cluster_utils import Cluster

from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.ray import cluster as clusters
from rollout_sched.integrations.ray.deployment import NAMESPACE, Deployment
from tests.neighbours.fleet import Program
from tests.ray.conftest import NODES, PATIENCE_S

CALL = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 20, "temperature": 0.0}


async def fronts(deployment: Deployment, count: int) -> dict[str, str]:
    """The URLs of `count` fronts, once they answer."""
    actor = await clusters.found(deployment)
    while len(found := (await clusters.facts(actor)).fronts) < count:
        await asyncio.sleep(0.2)
    return found


async def answer(url: str, **differs: Any) -> str:
    """The text of a completion; repeats the call until there is a scheduler."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.post(f"{url}/v1/completions", json={**CALL, **differs}) as got:
                if got.status == 200:
                    text: str = (await got.json())["choices"][0]["text"]
                    return text
                assert got.status == 503, await got.text()
            await asyncio.sleep(0.1)


def test_one_on_each_node_answers_clients_and_is_there_again(
    cluster: Cluster, servers: list[Program], tmp_path: Path
) -> None:
    async def scene() -> None:
        deployment = Deployment(name="mouths")
        urls = [server.url for server in servers]
        options = Options(policy="dplb", instances=urls, port=0, store=tmp_path / "store")
        await clusters.start(options, deployment)
        found = await fronts(deployment, NODES)
        assert len(set(found.values())) == NODES
        said = [await answer(url) for url in found.values()]
        assert len(set(said)) == 1
        name = min(found)
        actor = ray.get_actor(name, NAMESPACE)
        os.kill(await actor.__ray_call__.remote(lambda self: os.getpid()), signal.SIGKILL)
        again = await fronts(deployment, NODES)
        assert await answer(again[name]) == said[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{again[name]}/v1/models") as got:
                models = await got.json()  # through the scheduler's process
            assert [model["id"] for model in models["data"]] == ["m"]
        assert await clusters.stop(deployment)

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_so_many_anywhere(cluster: Cluster, servers: list[Program]) -> None:
    async def scene() -> None:
        deployment = Deployment(name="two", fronts=2)
        options = Options(policy="dplb", instances=[servers[0].url], port=0)
        await clusters.start(options, deployment)
        found = await fronts(deployment, 2)
        assert sorted(found) == [deployment.front(0), deployment.front(1)]
        assert await asyncio.gather(*map(answer, found.values()))
        assert await clusters.stop(deployment)

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
