"""A front as a Ray actor: takes clients' calls on a port of its node for a remote scheduler."""

from __future__ import annotations

import asyncio
import logging

from rollout_sched import process as log_lines
from rollout_sched.integrations.gateway import FrontOptions, FrontService
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.ray.deployment import NAMESPACE
from rollout_sched.integrations.ray.failed_start import end_if_failed
from rollout_sched.link import LinkDialler, SchedulerPlace

log = logging.getLogger(__name__)


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

        front_options = front_options_of(options, ray.util.get_node_ip_address())
        self._front = FrontService(name, front_options, on_broken=self._broken)
        self._dialler = LinkDialler(self._front, name, self._locate)
        await self._front.open()
        self._dialler.open()
        log.info("%s listens on %s", name, self._front.url)

    async def _locate(self) -> SchedulerPlace:
        """Raises ValueError if there is no scheduler, RayError while it is unreachable."""
        import ray

        actor = await asyncio.to_thread(ray.get_actor, self._scheduler, NAMESPACE)
        place, url = await actor.place.remote()
        self._front.scheduler_url = url
        found: SchedulerPlace = place
        return found

    def _broken(self, error: Exception) -> None:
        self._dialler.hang_up()


def front_options_of(options: Options, address: str) -> FrontOptions:
    """The options that both structs have, with `address` as the host."""
    both = set(FrontOptions.__struct_fields__) & set(Options.__struct_fields__)
    return FrontOptions(**{**{n: getattr(options, n) for n in both}, "host": address})
