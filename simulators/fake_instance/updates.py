"""What brings weights to a server: from disk, by transfer, and their label."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from rollout_sched.simulators.fake_instance.codec import decode, reply
from rollout_sched.simulators.fake_instance.engine import Engine
from rollout_sched.simulators.fake_instance.errors import Refusal


class _Rpc(msgspec.Struct):
    method: str
    kwargs: dict[str, Any] = {}


class _InitInfo(msgspec.Struct):
    init_info: dict[str, Any]


class _UpdateInfo(msgspec.Struct):
    update_info: dict[str, Any]


class _Finish(msgspec.Struct):
    weight_version: str | None = None


class _NewVersion(msgspec.Struct):
    new_version: str


class Updates:
    """Endpoints for weights; what they do is `Weights`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/update_weight_version", self.update_weight_version),
            web.post("/collective_rpc", self.collective_rpc),
            web.post("/init_weight_transfer_engine", self.init_weight_transfer_engine),
            web.post("/start_weight_update", self.start_weight_update),
            web.post("/update_weights", self.update_weights),
            web.post("/finish_weight_update", self.finish_weight_update),
        ]

    async def update_weight_version(self, request: web.Request) -> web.Response:
        label = decode(await request.read(), _NewVersion).new_version
        await self._engine.weights.set_label(label)
        return reply({"success": True, "new_version": label})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        rpc = decode(await request.read(), _Rpc)
        if rpc.method != "reload_weights":
            raise Refusal(500, f"Call to collective_rpc method failed: {rpc.method!r} is unknown")
        await self._engine.weights.reload(rpc.kwargs.get("weights_path"))
        return reply({"results": [None]})

    async def init_weight_transfer_engine(self, request: web.Request) -> web.Response:
        decode(await request.read(), _InitInfo)
        self._engine.weights.init_transfer()
        return reply({"message": "Weight transfer initialized"})

    async def start_weight_update(self, _: web.Request) -> web.Response:
        self._engine.weights.start_update()
        return reply({"message": "Weight update started"})

    async def update_weights(self, request: web.Request) -> web.Response:
        decode(await request.read(), _UpdateInfo)
        await self._engine.weights.update()
        return reply({"message": "Weights updated"})

    async def finish_weight_update(self, request: web.Request) -> web.Response:
        label = decode(await request.read() or b"{}", _Finish).weight_version
        await self._engine.weights.finish_update(label)
        return reply({"message": "Weight update finished"})
