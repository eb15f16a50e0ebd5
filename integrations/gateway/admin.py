"""/admin: instances, weights, pauses, and the state of the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
from aiohttp import web

from rollout_sched.integrations.gateway.broadcast import to_each
from rollout_sched.integrations.gateway.gateway import Gateway, NewInstance
from rollout_sched.integrations.gateway.messages import read, reply
from rollout_sched.integrations.gateway.publication import Publication
from rollout_sched.live.attendant import Attendant


class Halt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which instances to pause, by id or URL, all if none are named, and how."""

    mode: Literal["keep", "abort"] = "keep"
    clear_cache: bool = False
    instances: list[str] = []


class Admin:
    """Routes for administrators."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._leaving: set[asyncio.Task[None]] = set()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/admin/state", self.state),
            web.get("/admin/instances", self.instances),
            web.post("/admin/instances", self.add),
            web.get("/admin/instances/{id:(?s:.+)}", self.show),
            web.delete("/admin/instances/{id:(?s:.+)}", self.remove),
            web.post("/admin/instances/{id:(?s:.+)}/drain", self.drain),
            web.post("/admin/weights", self.weights),
            web.post("/admin/pause", self.pause),
            web.post("/admin/resume", self.resume),
        ]

    async def state(self, request: web.Request) -> web.Response:
        return reply(request, self._gateway.state())

    async def instances(self, request: web.Request) -> web.Response:
        return reply(request, [self._gateway.view(each) for each in self._gateway.attendants()])

    async def show(self, request: web.Request) -> web.Response:
        attendant = self._gateway.attendant(request.match_info["id"])
        return reply(request, self._gateway.view(attendant))

    async def add(self, request: web.Request) -> web.Response:
        attendant = await self._gateway.add(await read(request, NewInstance))
        status = 201 if attendant.joined else 202
        return reply(request, self._gateway.view(attendant), status)

    async def remove(self, request: web.Request) -> web.Response:
        """At once: what it holds goes on elsewhere."""
        await self._gateway.remove(request.match_info["id"])
        return web.Response(status=204)

    async def drain(self, request: web.Request) -> web.Response:
        """It finishes what it has, takes nothing new, and is removed then."""
        attendant = self._gateway.attendant(request.match_info["id"])
        if not self._gateway.view(attendant).leaving:
            task = asyncio.create_task(self._gateway.remove(attendant.name, drain=True))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            await asyncio.sleep(0)
        return reply(request, self._gateway.view(attendant), 202)

    async def weights(self, request: web.Request) -> web.Response:
        publication = await read(request, Publication)
        await self._gateway.publish(publication)
        return reply(request, {"version": publication.version}, 200 if publication.wait else 202)

    async def pause(self, request: web.Request) -> web.Response:
        halt = await read(request, Halt)

        async def hold(attendant: Attendant) -> dict[str, Any]:
            await attendant.hold(halt.mode, halt.clear_cache)
            return {"held": True}

        return await self._each(request, halt, hold)

    async def resume(self, request: web.Request) -> web.Response:
        async def let_go(attendant: Attendant) -> dict[str, Any]:
            await attendant.let_go()
            return {"held": False}

        return await self._each(request, await read(request, Halt), let_go)

    async def _each(
        self,
        request: web.Request,
        halt: Halt,
        deed: Callable[[Attendant], Awaitable[dict[str, Any]]],
    ) -> web.Response:
        chosen = [self._gateway.attendant(name) for name in halt.instances]
        status, answer = await to_each(chosen or self._gateway.attendants(), deed)
        return reply(request, answer, status)
