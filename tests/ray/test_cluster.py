"""Deployments that are started, found and stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from rollout_sched.core.errors import RolloutError
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.ray import cluster as clusters
from rollout_sched.integrations.ray.deployment import Deployment
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
    assert "is there already" in caplog.text


def test_what_cannot_start_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    async def scene() -> None:
        file = tmp_path / "file"
        file.write_text("")
        deployment = Deployment(name="nowhere", fronts=0)
        with pytest.raises(RolloutError, match="file"):
            await clusters.start(Options(policy="dplb", store=file), deployment)
        assert await clusters.found(deployment) is None

    run(scene())


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
