"""Decides which fronts a deployment has, and starts the missing ones, each an actor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

import msgspec

from rollout_sched import process as log_lines
from rollout_sched.integrations.gateway import FrontService
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.ray.deployment import (
    CALLS_AT_ONCE,
    FOR_EVER,
    NAMESPACE,
    Deployment,
    end_if_failed,
)
from rollout_sched.link import LinkDialler, SchedulerPlace

log = logging.getLogger(__name__)

#: Seconds between two reads of the cluster's nodes.
POLL_S = 2.0

#: Seconds for a front to answer.
ANSWER_S = 30.0


class Fronts:
    """Keeps the fronts of a deployment running. `arguments`: arguments of a front's actor after its
    name; `grace_s`: seconds in which each front lets its clients finish.

    A front outlives the scheduler that started it. Ray restarts it when its process dies: a
    per-node front on its node, the others on any node.
    """

    def __init__(self, deployment: Deployment, arguments: tuple[Any, ...], grace_s: float) -> None:
        self._deployment = deployment
        self._arguments = arguments
        self._grace_s = grace_s
        self._actors: dict[str, Any] = {}
        self._looking: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Returns when the present fronts are started; they may not be ready yet."""
        await self._place()
        if self._deployment.fronts == "per-node":
            self._looking = asyncio.get_running_loop().create_task(self._place_for_ever())

    async def close(self) -> None:
        """Start no more fronts; the running ones stay."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def urls(self) -> dict[str, str]:
        """The URLs of the fronts that answer, by name."""
        asked = {name: actor.url.remote() for name, actor in self._actors.items()}
        answers = await asyncio.gather(*map(_told, asked.values()))
        return {name: url for name, url in zip(asked, answers, strict=True) if url}

    async def stop(self) -> None:
        """Stop all fronts permanently; clients' requests may finish within the grace period."""
        import ray

        await self.close()
        actors = list(self._actors.values())
        within_s = self._grace_s + ANSWER_S
        await asyncio.gather(*(_told(actor.close.remote(), within_s) for actor in actors))
        for actor in actors:
            ray.kill(actor)

    async def _place(self) -> None:
        wanted = await asyncio.to_thread(placed, self._deployment)
        for name in self._actors.keys() - wanted.keys():
            log.warning("the node of front %s is gone", name)
            del self._actors[name]
        for name in wanted.keys() - self._actors.keys():
            self._actors[name] = await asyncio.to_thread(self._start, name, wanted[name])

    def _start(self, name: str, strategy: Any) -> Any:
        import ray

        actor = ray.remote(FrontActor).options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=FOR_EVER,
            max_concurrency=CALLS_AT_ONCE,
            num_cpus=self._deployment.front_cpus,
            scheduling_strategy=strategy,
        )
        return actor.remote(name, *self._arguments)

    async def _place_for_ever(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._place()
            except Exception as error:  # Ray is busy or unreachable: try again at the next read
                log.warning("cannot read the cluster's nodes: %s", error)


def placed(deployment: Deployment) -> dict[str, Any]:
    """The wanted fronts by name, each with its placement. Blocks until Ray answers."""
    if deployment.fronts != "per-node":
        return {deployment.front(number): "SPREAD" for number in range(deployment.fronts)}
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {
        deployment.front(node["NodeID"]): NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        for node in ray.nodes()
        if node["Alive"]
    }


async def _told(answer: Awaitable[Any], within_s: float = ANSWER_S) -> Any:
    """The answer of a front, or None if it does not answer in time."""
    try:
        async with asyncio.timeout(within_s):
            return await answer
    except Exception as error:
        log.warning("a front does not answer: %s", error)
        return None


# ------------------------------------------------------------------------------------------
# A front as a Ray actor: takes clients' calls on a port of its node for a remote scheduler.


class FrontActor:
    """Started as `ray.remote(FrontActor)`; Ray restarts it with the same arguments when its process
    dies. It looks up its scheduler by the name of its actor whenever the link is lost.

    `options`: those of the deployment; their host is for the scheduler, a front listens at the
    address of its node.
    """

    def __init__(self, name: str, scheduler: str, options: Options) -> None:
        log_lines.set_up(options.log_level, options.log_format)
        self._scheduler = scheduler
        self._front: FrontService
        self._dialler: LinkDialler
        self._starting = asyncio.get_running_loop().create_task(self._start(name, options))
        end_if_failed(self._starting)

    async def url(self) -> str:
        """The URL for clients. Raises OSError if the port is in use."""
        await self._starting
        return self._front.url

    async def close(self) -> None:
        """Let running requests finish within the grace period, then stop."""
        await self._starting
        await self._front.close()
        await self._dialler.close()

    async def _start(self, name: str, options: Options) -> None:
        import ray

        own = msgspec.structs.replace(options, host=ray.util.get_node_ip_address())
        self._front = FrontService(name, own, on_broken=self._broken)
        self._dialler = LinkDialler(self._front.calls, name, self._locate)
        await self._front.open()
        self._dialler.open()
        log.info("%s listens on %s", name, self._front.url)

    async def _locate(self) -> SchedulerPlace:
        """Raises ValueError if there is no scheduler, RayError while it is unreachable."""
        import ray

        actor = await asyncio.to_thread(ray.get_actor, self._scheduler, NAMESPACE)
        place, url = await actor.place.remote()
        self._front.app.scheduler_url = url
        found: SchedulerPlace = place
        return found

    def _broken(self, error: Exception) -> None:
        self._dialler.hang_up()
