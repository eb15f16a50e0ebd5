"""A front's process: clients' calls on a port of its node, before a scheduler elsewhere."""

from __future__ import annotations

import asyncio
import logging

from rollout_sched import log_lines
from rollout_sched.integrations.gateway.front_service import FrontOptions, FrontService
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.ray.deployment import NAMESPACE
from rollout_sched.integrations.ray.failed_start import end_if_failed
from rollout_sched.link.dialler import LinkDialler, SchedulerPlace

log = logging.getLogger(__name__)


class FrontActor:
    """What Ray makes of it is `ray.remote(FrontActor)`; made anew, with the same arguments,
    whenever its process has died. It finds its scheduler by the name of its actor, as often as it
    is lost.

    `options`: the deployment's; its host is for the scheduler, a front listens at its node's
    address.
    """

    def __init__(self, name: str, scheduler: str, options: Options) -> None:
        log_lines.set_up(options.log_level, options.log_format)
        self._scheduler = scheduler
        self._front: FrontService
        self._dialler: LinkDialler
        self._starting = asyncio.get_running_loop().create_task(self._start(name, options))
        end_if_failed(self._starting)

    async def url(self) -> str:
        """Where clients find it. Raises OSError if its port is taken."""
        await self._starting
        return self._front.url

    async def close(self) -> None:
        """Let what runs finish for the grace period, then stop."""
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
        """Raises ValueError if no scheduler is there, RayError while it is away."""
        import ray

        actor = await asyncio.to_thread(ray.get_actor, self._scheduler, NAMESPACE)
        place, url = await actor.place.remote()
        self._front.scheduler_url = url
        found: SchedulerPlace = place
        return found

    def _broken(self, error: Exception) -> None:
        self._dialler.hang_up()


def front_options_of(options: Options, address: str) -> FrontOptions:
    """Those that both have, at an address."""
    both = set(FrontOptions.__struct_fields__) & set(Options.__struct_fields__)
    return FrontOptions(**{**{n: getattr(options, n) for n in both}, "host": address})
