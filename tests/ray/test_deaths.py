"""Whatever process or node dies in the middle of a batch: nothing is lost, nothing comes twice, and
greedy responses are the same. KILLS: number of deaths of each kind, by seed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from rollout_sched.client import Applied, Batch, Prompt
from rollout_sched.integrations.ray import OnRay, on_ray
from rollout_sched.integrations.ray import cluster as clusters
from rollout_sched.integrations.ray.deployment import NAMESPACE, Deployment
from tests.neighbours.fleet import Program
from tests.ray.conftest import GREEDY, NODE, NODES
from tests.ray.test_fronts import answer, fronts

KILLS = int(os.environ.get("KILLS", "1"))

#: Seconds for one death and its consequences: Ray takes up to half a minute to notice a dead node.
PATIENCE_S = 180.0

GROUPS, SAMPLES, TOKENS = 12, 2, 100


def prompt(run: int, number: int) -> Prompt:
    """A prompt that is the same in each run, but has its own name."""
    return Prompt(f"r{run}g{number}", [number + 1, 7, 9], SAMPLES, TOKENS, GREEDY)


class Stage:
    """One deployment for all deaths of a kind: `run` trains a batch during a death."""

    def __init__(self, cluster: Cluster, rollouts: OnRay, deployment: Deployment) -> None:
        self.cluster = cluster
        self.deployment = deployment
        self._rollouts = rollouts
        self._runs = 0
        self._wanted: dict[tuple[int, int], list[int]] = {}
        self.frozen: tuple[Any, tuple[int, ...]]

    async def run(self, die: Callable[[], Awaitable[None]] | None, after_s: float = 0.0) -> None:
        run, self._runs = self._runs, self._runs + 1
        calls = [asyncio.ensure_future(self.call()) for _ in range(3)]
        await self._rollouts.submit(prompt(run, number) for number in range(GROUPS))
        waiting = asyncio.ensure_future(self._rollouts.next_batch())
        if die is not None:
            while not (await self._rollouts.state())["requests"]["in_flight"]:
                await asyncio.sleep(0.02)
            await asyncio.sleep(after_s)
            await die()
        batch = await waiting
        assert batch is not None
        self.check(run, batch)
        if die == self.freeze_node:
            self.bury()  # otherwise its clients would wait for their own timeouts
        if die is None or die == self.kill_scheduler:
            assert len(set(await asyncio.gather(*calls))) == 1  # they see only a pause
        await asyncio.gather(*calls, return_exceptions=True)
        await self._rollouts.publish_weights(self._runs, Applied())

    async def call(self) -> str:
        """A client's call at any front."""
        found = await fronts(self.deployment, 1)
        return await answer(random.choice(list(found.values())), max_tokens=TOKENS)

    def check(self, run: int, batch: Batch) -> None:
        assert not batch.failed
        came = Counter((sample.uid, sample.index) for sample in batch.samples)
        whole = {(f"r{run}g{n}", i) for n in range(GROUPS) for i in range(SAMPLES)}
        assert set(came) == whole, "something is lost"
        assert set(came.values()) == {1}, "something came twice"
        for sample in batch.samples:
            place = sample.prompt_ids[0], sample.index
            assert sample.response_ids == self._wanted.setdefault(place, sample.response_ids)

    # -- deaths ----------------------------------------------------------------------------

    async def kill_scheduler(self) -> None:
        await _kill(await clusters.found(self.deployment))

    async def kill_front(self, number: int) -> None:
        found = sorted(await fronts(self.deployment, NODES))
        await _kill(ray.get_actor(found[number % NODES], NAMESPACE))

    async def kill_node(self, number: int) -> None:
        """Kill a node, but never the head, which belongs to Ray, and add another."""
        nodes = self.cluster.worker_nodes
        node = sorted(nodes, key=lambda node: str(node.node_id))[number % len(nodes)]
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)
        self.cluster.add_node(**NODE, wait=False)

    async def freeze_node(self) -> None:
        """Stop all processes of a node: they do not answer, and no connection is closed."""
        here = ray.get_runtime_context().get_node_id()  # also the scheduler's node
        node = next(node for node in self.cluster.worker_nodes if node.node_id != here)
        front = ray.get_actor(self.deployment.front(node.node_id), NAMESPACE)
        processes = await _pid(front), node.all_processes["raylet"][0].process.pid
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        self.frozen = node, processes

    def bury(self) -> None:
        """Kill the frozen node and add another."""
        node, processes = self.frozen
        for process in processes:
            os.kill(process, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)
        self.cluster.add_node(**NODE, wait=False)


async def _kill(actor: Any) -> None:
    os.kill(await _pid(actor), signal.SIGKILL)


async def _pid(actor: Any) -> int:
    pid: int = await actor.__ray_call__.remote(lambda self: os.getpid())
    return pid


def deaths(kind: str, cluster: Cluster, servers: list[Program], folder: Path) -> None:
    """`KILLS` deaths of one kind, each in the middle of a batch."""

    async def scene() -> None:
        deployment = Deployment(name=f"deaths-{kind}")
        rollouts = on_ray(
            "one_step_off",
            [server.url for server in servers],
            name=deployment.name,
            store=folder / "store",
            shared_store=True,
            prompts_per_step=GROUPS,
            port=0,
            stream_every=4,
        )
        async with rollouts:
            await fronts(deployment, NODES)
            stage = Stage(cluster, rollouts, deployment)
            await stage.run(None)
            for seed in range(KILLS):
                rng = random.Random(seed)
                who, after_s = rng.randrange(100), rng.uniform(0.0, 1.0)
                die: Callable[[], Awaitable[None]] = stage.kill_scheduler
                if kind == "vanished":
                    die = stage.freeze_node
                elif kind != "scheduler":
                    kill = stage.kill_front if kind == "front" else stage.kill_node
                    die = lambda kill=kill, who=who: kill(who)  # noqa: E731
                print(f"{kind} {seed}: {who} dies after {after_s:.2f} s", flush=True)
                await asyncio.wait_for(stage.run(die, after_s), PATIENCE_S)
                await asyncio.wait_for(fronts(deployment, NODES), PATIENCE_S)
            state = await rollouts.state()
            assert state["requests"] == {"in_flight": 0, "waiting": 0, "parked": 0}
            assert not state["failed"]
        assert await clusters.stop(deployment)

    asyncio.run(scene())


@pytest.mark.parametrize("kind", ["front", "scheduler", "node", "vanished"])
def test_nothing_is_lost_and_nothing_comes_twice(
    kind: str, cluster: Cluster, servers: list[Program], tmp_path: Path
) -> None:
    deaths(kind, cluster, servers, tmp_path)
