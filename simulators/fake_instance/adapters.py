"""LoRA adapters, by the paths of vLLM, of SkyRL (0.3.0) and of prime-rl (2026-08).

Their effect on the text is not simulated: a request may name one as its model.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from rollout_sched.simulators.fake_instance.codec import decode, reply
from rollout_sched.simulators.fake_instance.engine import Engine
from rollout_sched.simulators.fake_instance.errors import Refusal


class _Load(msgspec.Struct):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class _Unload(msgspec.Struct):
    lora_name: str


class Adapters:
    """Endpoints for adapters. SkyRL's and prime-rl's calls replace an adapter of the same name."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/load_lora_adapter", self.load),
            web.post("/v1/unload_lora_adapter", self.unload),
            web.post("/skyrl/v1/load_lora_adapter", self.load_for_skyrl),
            web.post("/load_lora_adapter", self.load_for_prime),
        ]

    async def load(self, request: web.Request) -> web.Response:
        told = decode(await request.read(), _Load)
        if told.lora_name in self._engine.adapters and not told.load_inplace:
            raise Refusal(400, f"The lora adapter '{told.lora_name}' has already been loaded.")
        self._engine.adapters[told.lora_name] = told.lora_path
        return web.Response(text=f"Success: LoRA adapter '{told.lora_name}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        name = decode(await request.read(), _Unload).lora_name
        if self._engine.adapters.pop(name, None) is None:
            raise Refusal(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def load_for_skyrl(self, request: web.Request) -> web.Response:
        told = decode(await request.read(), _Load)
        self._engine.adapters[told.lora_name] = told.lora_path
        number = 1 + list(self._engine.adapters).index(told.lora_name)
        return reply({"status": "ok", "lora_name": told.lora_name, "lora_int_id": number})

    async def load_for_prime(self, request: web.Request) -> web.Response:
        told = decode(await request.read(), _Load)
        self._engine.adapters[told.lora_name] = told.lora_path
        return reply({"status": "ok"})
