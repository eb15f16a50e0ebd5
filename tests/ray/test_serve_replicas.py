"""Replicas of real Ray Serve applications join and leave, each as a separate instance."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any

import aiohttp
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from starlette.requests import Request
from starlette.responses import StreamingResponse

from rollout_sched.client import RolloutScheduler
from rollout_sched.integrations.ray import cluster as clusters
from rollout_sched.integrations.ray import on_ray
from rollout_sched.integrations.ray.deployment import Deployment
from rollout_sched.integrations.ray.servers import NamedServers, ServeReplicas, pattern_of
from tests.neighbours.fleet import fake_instance
from tests.ray.conftest import PATIENCE_S, prompts

OPTIONS = ("--model", "m", "--speed", "0.5", "--median-tokens", "60", "--vocab-size", "512")


class Server:
    """A simulated vLLM server in its own process, which lives as long as the replica."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._server = self._stack.enter_context(fake_instance(*OPTIONS))

    def __del__(self) -> None:
        self._stack.close()


@serve.deployment(ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=5)
class Telling(Server):
    def url(self) -> str:
        return self._server.url


@serve.deployment(ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=5)
class Silent(Server):
    """The replica itself serves the API, as in `ray.serve.llm` with direct streaming."""

    async def __call__(self, request: Request) -> StreamingResponse:
        path = request.url.path.removeprefix("/silent")
        session = aiohttp.ClientSession()
        answer = await session.request(
            request.method,
            f"{self._server.url}{path}",
            params=list(request.query_params.multi_items()),
            data=await request.body(),
            headers={"Content-Type": "application/json"},
        )

        async def body() -> AsyncIterator[bytes]:
            async with session, answer:
                async for piece in answer.content.iter_any():
                    yield piece

        kind = answer.headers.get("Content-Type", "")
        return StreamingResponse(body(), answer.status, media_type=kind)


@serve.deployment(ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=5)
class Hidden:
    """A deployment behind another one, without a method that returns a URL."""


@serve.deployment(ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=5)
class Before:
    def __init__(self, hidden: Any) -> None: ...

    def url(self) -> str:
        return "http://before:1"


@pytest.fixture(scope="module", autouse=True)
def _serving(cluster: Cluster) -> Iterator[None]:
    address = ray.util.get_node_ip_address()  # the replicas' ports are at this address, too
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": address, "port": port})
    yield
    serve.shutdown()


@pytest.mark.parametrize("kind", [Telling, Silent], ids=["told", "port"])
def test_each_replica_is_an_instance_while_it_is_there(kind: Any) -> None:
    name = kind.name.lower()

    async def grow(replicas: int) -> None:
        app = kind.options(num_replicas=replicas).bind()
        await asyncio.to_thread(serve.run, app, name=name, route_prefix=f"/{name}")

    async def scene() -> None:
        await grow(2)
        deployment = f"serve-{name}"
        rollouts = on_ray(
            "one_step_off", [], name=deployment, fronts=0, serve_apps=name, prompts_per_step=8
        )
        async with rollouts:
            await _instances(rollouts, 2)
            await rollouts.submit(prompts(8))
            first = await rollouts.next_batch()
            assert first is not None
            assert set(first.groups()) == {f"g{n}" for n in range(8)}
            await grow(3)
            await _instances(rollouts, 3)
            await grow(1)
            await _instances(rollouts, 1)
            await rollouts.submit(prompts(16)[8:])
            assert (await rollouts.next_batch()) is not None
            await asyncio.to_thread(serve.delete, name)
            await _instances(rollouts, 0)
        assert await clusters.stop(Deployment(name=deployment))

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_a_replica_that_dies_goes_and_another_comes() -> None:
    async def scene() -> None:
        app = Telling.options(num_replicas=1).bind()
        await asyncio.to_thread(serve.run, app, name="mortal", route_prefix="/mortal")
        here: set[str] = set()

        async def add(url: str) -> None:
            here.add(url)

        async def remove(url: str) -> None:
            here.remove(url)

        replicas = ServeReplicas()
        servers = NamedServers(pattern_of("mortal"), "url", add, remove, replicas)
        await servers.follow()
        first = set(here)
        assert len(first) == 1
        os.kill(await _process("mortal"), signal.SIGKILL)
        while len(here) != 1 or here == first:
            await asyncio.sleep(0.2)
            await servers.follow()
        await asyncio.to_thread(serve.delete, "mortal")

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_a_replica_without_an_address_of_its_own_is_said_with_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> None:
        app = Before.bind(Hidden.bind())
        await asyncio.to_thread(serve.run, app, name="two", route_prefix="/two")
        here: list[str] = []

        async def add(url: str) -> None:
            here.append(url)

        servers = NamedServers(pattern_of("two"), "url", add, add, ServeReplicas())
        for _ in range(2):
            await servers.follow()
        assert here == ["http://before:1"]
        await asyncio.to_thread(serve.delete, "two")

    caplog.set_level(logging.WARNING)
    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
    assert caplog.text.count("two/Hidden/") == 1
    assert "RAY_SERVE_ENABLE_DIRECT_INGRESS=1" in caplog.text


async def _process(app: str) -> int:
    from ray.serve.context import _get_global_client

    details = await asyncio.to_thread(_get_global_client().get_serve_details)
    (deployment,) = details["applications"][app]["deployments"].values()
    (replica,) = deployment["replicas"]
    return int(replica["pid"])


async def _instances(rollouts: RolloutScheduler, count: int) -> None:
    while (await rollouts.state())["instances"] != count:
        await asyncio.sleep(0.2)
