"""A trainer and its scheduler on a real cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from rollout_sched.client import Applied
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.ray import cluster as clusters
from rollout_sched.integrations.ray import on_ray
from rollout_sched.integrations.ray.deployment import Deployment
from tests.neighbours.fleet import Program
from tests.ray.conftest import PATIENCE_S, prompts


def test_batches_come_by_value_and_by_reference(
    cluster: Cluster, servers: list[Program], tmp_path: Path
) -> None:
    async def scene() -> None:
        rollouts = on_ray(
            "one_step_off",
            [server.url for server in servers],
            fronts=0,
            prompts_per_step=4,
            store=tmp_path / "store",
        )
        async with asyncio.timeout(PATIENCE_S), rollouts:
            await rollouts.submit(prompts(12))
            await rollouts.close_submissions()
            first = await rollouts.next_batch()
            assert first is not None
            assert len(first.groups()) == 4
            await rollouts.publish_weights(1, Applied(), wait=True)
            second = await rollouts.next_micro_batches(2)
            assert second is not None
            assert second.batch.number == 1
            seen = await asyncio.gather(*(look.remote(ref) for ref in second.refs))
            assert sum(samples for samples, _, _ in seen) == 8
            for _, tokens, lengths in seen:
                assert tokens == lengths
            await rollouts.publish_weights(2, Applied())
            third = await rollouts.next_batch()
            assert third is not None
            uids = {*first.groups(), *third.groups()}
            for ref in second.refs:
                uids |= set(map(str, (await ref)["uids"]))
            assert uids == {f"g{n}" for n in range(12)}
            assert await rollouts.next_micro_batches(2) is None
        assert await clusters.stop(Deployment())

    asyncio.run(scene())


@ray.remote(num_cpus=0)
def look(arrays: dict[str, np.ndarray]) -> tuple[int, int, int]:
    """What a worker sees of a micro-batch: the number of samples, and of tokens in two ways."""
    assert not arrays["input_ids"].flags.writeable  # it is in the object store
    ends = arrays["cu_seqlens"]
    return len(ends) - 1, len(arrays["input_ids"]), int(ends[-1])


def test_what_is_not_there_or_wrong_is_said(cluster: Cluster, tmp_path: Path) -> None:
    async def scene() -> None:
        with pytest.raises(CallerError, match="no deployment 'other' on this cluster"):
            await on_ray(name="other").__aenter__()
        with pytest.raises(CallerError, match="no preset"):
            await on_ray("no preset", fronts=0).__aenter__()
        assert await clusters.found(Deployment()) is None

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
