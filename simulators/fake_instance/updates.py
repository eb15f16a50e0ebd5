"""Endpoints that load weights, by a worker's method or by transfer, and set their label."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from rollout_sched.simulators.fake_instance.codec import decode, reply
from rollout_sched.simulators.fake_instance.engine import Engine
from rollout_sched.simulators.fake_instance.errors import Refusal
from rollout_sched.simulators.fake_instance.rendezvous import RankRange


class _Rpc(msgspec.Struct):
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class _Ranks(msgspec.Struct):
    """A server's ranks in an NCCL group, with the trainer as rank 0."""

    master_address: str
    master_port: int | str
    rank_offset: int
    world_size: int


class _InitInfo(msgspec.Struct):
    """Backends without NCCL send other fields."""

    init_info: dict[str, Any]


class _Update(msgspec.Struct):
    """vLLM's body, or that of prime-rl, whose server has its own /update_weights."""

    update_info: dict[str, Any] | None = None
    weight_dir: str | msgspec.UnsetType | None = msgspec.UNSET


class _Finish(msgspec.Struct):
    weight_version: str | None = None


class _NewVersion(msgspec.Struct):
    new_version: str


class Updates:
    """Endpoints for weights; `Weights` does the work."""

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
        """vLLM's own methods, and those of SkyRL's worker extension."""
        rpc = decode(await request.read(), _Rpc)
        weights = self._engine.weights
        match rpc.method:
            case "reload_weights":
                await weights.reload(rpc.kwargs.get("weights_path"))
            case "skyrl_start_weight_update":
                weights.start_update()
            case "update_weights_nccl" | "update_weights_ipc":
                await weights.update()
            case "skyrl_finish_weight_update":
                await weights.finish_update(None)
            case _:
                message = f"Call to collective_rpc method failed: {rpc.method!r} is unknown"
                raise Refusal(500, message)
        return reply({"results": [None] * self._engine.settings.world_size})

    async def init_weight_transfer_engine(self, request: web.Request) -> web.Response:
        info = decode(await request.read(), _InitInfo).init_info
        place = None
        if "rank_offset" in info:
            told = decode(msgspec.json.encode(info), _Ranks)
            place = RankRange(
                f"{told.master_address}:{told.master_port}",
                told.rank_offset,
                self._engine.settings.world_size,
                told.world_size,
            )
        await self._engine.weights.init_transfer(place)
        return reply({"message": "Weight transfer initialized"})

    async def start_weight_update(self, _: web.Request) -> web.Response:
        self._engine.weights.start_update()
        return reply({"message": "Weight update started"})

    async def update_weights(self, request: web.Request) -> web.Response:
        told = decode(await request.read(), _Update)
        weights = self._engine.weights
        if told.update_info is not None:
            await weights.update()
            return reply({"message": "Weights updated"})
        if told.weight_dir is msgspec.UNSET:
            raise Refusal(400, "Object missing required field `update_info`")
        await (weights.receive() if told.weight_dir is None else weights.reload(told.weight_dir))
        return reply({"status": "ok"})

    async def finish_weight_update(self, request: web.Request) -> web.Response:
        label = decode(await request.read() or b"{}", _Finish).weight_version
        await self._engine.weights.finish_update(label)
        return reply({"message": "Weight update finished"})
