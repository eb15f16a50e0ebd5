"""Endpoints that control a server and its requests: pause, resume, abort, reset the cache."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from aiohttp import web

from rollout_sched.simulators.fake_instance.codec import decode, flag, reply
from rollout_sched.simulators.fake_instance.engine import Engine
from rollout_sched.simulators.fake_instance.errors import Refusal
from rollout_sched.simulators.instance.sim_request import PauseMode

#: The memory that can be released; the tags restore it.
_MEMORY = ("weights", "kv_cache")


class _Ids(msgspec.Struct):
    request_ids: list[str] | None = None


class ControlEndpoints:
    """Endpoints to control a server."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.post("/sleep", self.sleep),
            web.post("/wake_up", self.wake_up),
            web.get("/is_sleeping", self.is_sleeping),
            web.post("/abort_requests", self.abort_any),
            web.post("/inference/v1/abort_requests", self.abort),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
        ]

    async def pause(self, request: web.Request) -> web.Response:
        await self._engine.pause(_mode(request), flag(request, "clear_cache", True))
        return reply({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        await self._engine.resume()
        return reply({"status": "resumed"})

    async def sleep(self, request: web.Request) -> web.Response:
        """At every level, all memory that it computes with is released."""
        await self._engine.pause(_mode(request), True)
        self._engine.asleep = set(_MEMORY)
        return reply({"status": "sleeping", "level": int(request.query.get("level", 1))})

    async def wake_up(self, request: web.Request) -> web.Response:
        """Restore memory in parts, by `tags`; the server resumes when all of it is restored."""
        tags = request.query.getall("tags", []) or None
        self._engine.asleep -= set(tags or _MEMORY)
        if not self._engine.asleep:
            await self._engine.resume()
        return reply({"status": "sleeping" if self._engine.asleep else "awake", "tags": tags})

    async def is_sleeping(self, _: web.Request) -> web.Response:
        return reply({"is_sleeping": bool(self._engine.asleep)})

    async def abort_any(self, request: web.Request) -> web.Response:
        """Without ids: all requests. Unknown ids count too."""
        ids = decode(await request.read(), _Ids).request_ids
        if ids:
            await self._abort(ids)
            return reply({"status": "aborted", "aborted": len(ids)})
        return reply({"status": "aborted", "aborted": self._engine.instance.abort_all()})

    async def abort(self, request: web.Request) -> web.Response:
        ids = decode(await request.read(), _Ids).request_ids
        if ids is None:
            raise Refusal(400, "Missing 'request_ids' in request body")
        await self._abort(ids)
        return web.Response()

    async def _abort(self, ids: list[str]) -> None:
        for order_id in ids:
            await self._engine.instance.abort(order_id)

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        preempt = flag(request, "reset_running_requests", False)
        return reply({"success": self._engine.instance.clocked.clear_cache(preempt=preempt)})


def _mode(request: web.Request) -> PauseMode:
    mode: Any = request.query.get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise Refusal(400, f"mode must be abort, wait or keep, got {mode!r}", "mode")
    told: PauseMode = mode
    return told
