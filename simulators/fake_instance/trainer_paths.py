"""Paths that prime-rl's and AReaL's own vLLM servers add to vLLM's.

prime-rl (2026-08): `orchestrator/clients.py`; AReaL 1.0.4: `engine/vllm_ext/areal_vllm_server.py`,
whose answers report success, with 400 on failure, and whose updates pause and resume by themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec
from aiohttp import web

from rollout_sched.core.model.records import Size
from rollout_sched.simulators.fake_instance.engine import Engine, RankRange
from rollout_sched.simulators.fake_instance.requests import Refusal, decode, reply


class _Broadcaster(msgspec.Struct):
    """The trainer is rank 0, not counted in the last two; without them there is no rendezvous."""

    host: str
    port: int
    rank_offset: Size | None = None
    inference_world_size: Size | None = None


class _Group(msgspec.Struct):
    """The trainer is rank 0."""

    master_address: str
    master_port: str
    rank_offset: Size
    world_size: Size
    backend: str
    group_name: str


class _Meta(msgspec.Struct):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str


class _Disk(msgspec.Struct):
    model_path: str


class TrainerPaths:
    """Endpoints for trainers that use a server of their own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/init_broadcaster", self.init_broadcaster),
            web.post("/areal_pause_generation", self.pause),
            web.post("/areal_continue_generation", self.resume),
            web.post("/areal_init_weights_update_group", self.init_group),
            web.post("/areal_set_update_weight_meta", self.set_meta),
            web.post("/areal_update_weights", self.update_from_disk),
            web.post("/areal_update_weights_xccl", self.update_by_transfer),
        ]

    async def init_broadcaster(self, request: web.Request) -> web.Response:
        told = decode(await request.read(), _Broadcaster)
        place = None
        if told.rank_offset is not None and told.inference_world_size is not None:
            group = f"{told.host}:{told.port}"
            place = self._place(group, told.rank_offset + 1, told.inference_world_size + 1)
        await self._engine.weights.init_transfer(place)
        return reply({"status": "ok"})

    async def pause(self, _: web.Request) -> web.Response:
        await self._engine.pause("abort", True)
        return _done("Generation paused and all requests aborted")

    async def resume(self, _: web.Request) -> web.Response:
        await self._engine.resume()
        return _done("Generation continued")

    async def init_group(self, request: web.Request) -> web.Response:
        told = decode(await request.read(), _Group)
        group = f"{told.master_address}:{told.master_port}"
        place = self._place(group, told.rank_offset, told.world_size)
        return await _tried(self._engine.weights.init_transfer(place))

    async def set_meta(self, request: web.Request) -> web.Response:
        decode(await request.read(), _Meta)
        return _done("TP rank: 0 success")

    async def update_from_disk(self, request: web.Request) -> web.Response:
        path = decode(await request.read(), _Disk).model_path
        await self._engine.pause("abort", True)
        try:
            return await _tried(self._engine.weights.reload(path))
        finally:
            await self._engine.resume()

    async def update_by_transfer(self, _: web.Request) -> web.Response:
        await self._engine.pause("abort", True)
        try:
            return await _tried(self._engine.weights.receive())
        finally:
            await self._engine.resume()

    def _place(self, group: str, first: int, world: int) -> RankRange:
        return RankRange(group, first, self._engine.settings.world_size, world)


async def _tried(doing: Awaitable[None]) -> web.Response:
    try:
        await doing
    except Refusal as refusal:
        message = f"TP rank: 0 failed. reason: {refusal}"
        return reply({"success": False, "message": message}, 400)
    return _done("TP rank: 0 success")


def _done(message: str) -> web.Response:
    return reply({"success": True, "message": message})


# ------------------------------------------------------------------------------------------
# Endpoints that load weights, by a worker's method or by transfer, and set their label.


class _Rpc(msgspec.Struct):
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class _Ranks(msgspec.Struct):
    """A server's ranks in an NCCL group, with the trainer as rank 0."""

    master_address: str
    master_port: int | str
    rank_offset: Size
    world_size: Size


class _InitInfo(msgspec.Struct):
    """Backends without NCCL send other fields."""

    init_info: dict[str, Any]


class _Update(msgspec.Struct):
    """vLLM's body, or that of prime-rl, whose server has its own /update_weights."""

    update_info: dict[str, Any] | None = None
    weight_dir: str | msgspec.UnsetType | None = msgspec.UNSET


class _Finish(msgspec.Struct):
    weight_version: str | None = None


class _Fetch(msgspec.Struct):
    target_version: int


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
            web.post("/start_draft_weight_update", self.start_draft_weight_update),
            web.post("/fetch_weights", self.fetch_weights),
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

    async def start_draft_weight_update(self, _: web.Request) -> web.Response:
        if self._engine.settings.spec.speculation is None:
            raise Refusal(500, "Draft model weight update requested, but no draft model is there")
        self._engine.weights.start_update("draft")
        return reply({"message": "Draft weight update started"})

    async def fetch_weights(self, request: web.Request) -> web.Response:
        """SkyRL's: the files of new weights come to the server's disk."""
        decode(await request.read(), _Fetch)
        return reply({"status": "ok", "result": [None] * self._engine.settings.world_size})

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
