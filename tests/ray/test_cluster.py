"""Deployments are started, found and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.ray import cluster as clusters
from rollout_sched.integrations.ray.deployment import NAMESPACE, Deployment
from tests.ray.conftest import PATIENCE_S


def run(scene: Any) -> None:
    asyncio.run(asyncio.wait_for(scene, PATIENCE_S))


def test_who_is_there_stays_as_it_is(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        deployment = Deployment(name="twice", fronts=0)
        options = Options(policy="dplb", store=tmp_path / "store")
        first = await clusters.start(options, deployment)
        assert await clusters.start(Options(policy="round_robin_sync"), deployment) == first
        assert await clusters.stop(deployment)
        assert await clusters.found(deployment) is None

    run(scene())
    assert "already exists" in caplog.text


def test_what_cannot_start_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    async def scene() -> None:
        file = tmp_path / "file"
        file.write_text("")
        deployment = Deployment(name="nowhere", fronts=0)
        with pytest.raises(RolloutError, match="file"):
            await clusters.start(Options(policy="dplb", store=file), deployment)
        assert await clusters.found(deployment) is None

    run(scene())


def test_a_port_that_is_taken_leaves_nothing(cluster: Cluster) -> None:
    async def scene() -> None:
        with socket.create_server((ray.util.get_node_ip_address(), 0)) as taken:
            port = taken.getsockname()[1]
            deployment = Deployment(name="late", fronts=1, scheduler_port=port)
            with pytest.raises(CallerError, match=rf"--port {port}: address already in use"):
                await clusters.start(Options(policy="dplb"), deployment)
            assert await clusters.found(deployment) is None
        await clusters.start(Options(policy="dplb"), deployment)
        assert await clusters.stop(deployment)

    run(scene())


def test_two_that_start_it_at_once_have_the_same(cluster: Cluster) -> None:
    async def scene() -> None:
        deployment = Deployment(name="once", fronts=0)
        start = clusters.start(Options(policy="dplb"), deployment)
        other = clusters.start(Options(policy="dplb"), deployment)
        one, two = await asyncio.gather(start, other)
        assert one == two
        assert await clusters.stop(deployment)

    run(scene())


def test_fronts_whose_scheduler_is_gone_for_good_are_stopped(cluster: Cluster) -> None:
    async def scene() -> None:
        deployment = Deployment(name="headless", fronts=2)
        await clusters.start(Options(policy="dplb", port=0), deployment)
        names = [deployment.front(number) for number in range(2)]
        fronts = [ray.get_actor(name, NAMESPACE) for name in names]
        ray.kill(await clusters.found(deployment))
        while await clusters.found(deployment) is not None:
            await asyncio.sleep(0.1)
        assert await clusters.stop(deployment)
        for front in fronts:
            with pytest.raises(ray.exceptions.ActorDiedError):
                await front.url.remote()
        assert not await clusters.stop(deployment)

    run(scene())


def test_one_that_cannot_start_again_yet_is_tried_until_it_can(cluster: Cluster) -> None:
    async def scene() -> None:
        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        deployment = Deployment(name="again", fronts=0, scheduler_port=port)
        first = await clusters.start(Options(policy="dplb"), deployment)
        actor = await clusters.found(deployment)
        process = await actor.__ray_call__.remote(lambda self: os.getpid())
        os.kill(process, signal.SIGKILL)
        with await bound(address, port):
            while "in use" not in await refusal(actor):
                await asyncio.sleep(0.1)
        while await refusal(actor):
            await asyncio.sleep(0.1)
        assert await clusters.facts(actor) == first
        assert await clusters.stop(deployment)

    run(scene())


async def refusal(actor: Any) -> str:
    """Why the actor has not started; "" once it has."""
    try:
        await clusters.facts(actor)
    except CallerError as error:
        return str(error)
    return ""


async def bound(address: str, port: int) -> socket.socket:
    """A socket on the port, once the process that had it is gone."""
    while True:
        try:
            return socket.create_server((address, port))
        except OSError:
            await asyncio.sleep(0.01)


def test_it_is_where_it_is_to_be(cluster: Cluster, tmp_path: Path) -> None:
    async def scene() -> None:
        here = ray.get_runtime_context().get_node_id()
        other = next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)
        for node, found in (("", here), (other, other)):
            deployment = Deployment(name="placed", fronts=0, scheduler_node=node)
            await clusters.start(Options(policy="dplb", store=tmp_path / "store"), deployment)
            actor = await clusters.found(deployment)
            where = await actor.__ray_call__.remote(
                lambda self: ray.get_runtime_context().get_node_id()
            )
            assert where == found
            assert await clusters.stop(deployment)

    run(scene())
