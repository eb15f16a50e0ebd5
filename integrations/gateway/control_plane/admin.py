"""The routes of /admin for instances and pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
from aiohttp import web

from rollout_sched.integrations.gateway.control_plane.codec import read, reply
from rollout_sched.integrations.gateway.control_plane.fanout import to_each
from rollout_sched.integrations.gateway.control_plane.gateway import Gateway, NewInstance
from rollout_sched.live.instances import InstanceSupervisor


class InstanceNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which instances, by id or URL; all if none are named."""

    instances: list[str] = []


class PauseCall(InstanceNames, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which instances to pause, and how."""

    mode: Literal["keep", "abort"] = "keep"
    clear_cache: bool = False


class Admin:
    """Handlers for administrators."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._leaving: set[asyncio.Task[None]] = set()

    async def instances(self, request: web.Request) -> web.Response:
        """All instances."""
        return reply(request, [self._gateway.view(each) for each in self._gateway.supervisors()])

    async def show(self, request: web.Request) -> web.Response:
        """One instance, by id or quoted URL."""
        supervisor = self._gateway.supervisor(request.match_info["id"])
        return reply(request, self._gateway.view(supervisor))

    async def add(self, request: web.Request) -> web.Response:
        """Add an instance: 201 if it has joined, 202 if it is away and `patient`."""
        supervisor = await self._gateway.add(await read(request, NewInstance))
        status = 201 if supervisor.joined else 202
        return reply(request, self._gateway.view(supervisor), status)

    async def remove(self, request: web.Request) -> web.Response:
        """Remove an instance at once: its requests continue on other instances."""
        await self._gateway.remove(request.match_info["id"])
        return web.Response(status=204)

    async def drain(self, request: web.Request) -> web.Response:
        """The instance finishes its requests, takes no new ones, and is then removed."""
        supervisor = self._gateway.supervisor(request.match_info["id"])
        if not self._gateway.view(supervisor).leaving:
            task = asyncio.create_task(self._gateway.remove(supervisor.name, drain=True))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            await asyncio.sleep(0)
        return reply(request, self._gateway.view(supervisor), 202)

    async def pause(self, request: web.Request) -> web.Response:
        """Pause instances, and hold them until they are released."""
        halt = await read(request, PauseCall)

        async def hold(supervisor: InstanceSupervisor) -> dict[str, Any]:
            await supervisor.control.hold(halt.mode, halt.clear_cache)
            return {"held": True}

        return await self._each(request, halt, hold)

    async def resume(self, request: web.Request) -> web.Response:
        """Release instances that are held."""

        async def release(supervisor: InstanceSupervisor) -> dict[str, Any]:
            await supervisor.control.release()
            return {"held": False}

        return await self._each(request, await read(request, InstanceNames), release)

    async def _each(
        self,
        request: web.Request,
        named: InstanceNames,
        order: Callable[[InstanceSupervisor], Awaitable[dict[str, Any]]],
    ) -> web.Response:
        chosen = [self._gateway.supervisor(name) for name in named.instances]
        status, answer = await to_each(chosen or self._gateway.supervisors(), order)
        return reply(request, answer, status)
