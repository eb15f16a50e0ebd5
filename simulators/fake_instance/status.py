"""The endpoints that report a server's health, load, model and configuration."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from rollout_sched.live.ports import InstanceError
from rollout_sched.simulators.fake_instance import metrics_text
from rollout_sched.simulators.fake_instance.codec import reply
from rollout_sched.simulators.fake_instance.engine import Engine
from rollout_sched.simulators.fake_instance.errors import Refusal

#: The vLLM version that is simulated.
VERSION = "0.32.0"

#: The reported type of its weights.
DTYPE = "torch.bfloat16"

#: Log-probs are reported after temperature and penalties; no others are simulated.
LOGPROBS_MODE = "processed_logprobs"


class Status:
    """Read-only endpoints."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self) -> list[web.RouteDef]:
        handlers = {
            "/health": self.health,
            "/liveness": self.health,
            "/metrics": self.metrics,
            "/load": self.load,
            "/version": self.version,
            "/v1/models": self.models,
            "/server_info": self.server_info,
            "/is_paused": self.is_paused,
            "/weight_info": self.weight_info,
            "/get_world_size": self.world_size,
        }
        return [web.get(path, handler, allow_head=False) for path, handler in handlers.items()]

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._engine.dead else 200)

    async def metrics(self, _: web.Request) -> web.Response:
        try:
            gauges = await self._engine.instance.gauges()
        except InstanceError as error:
            raise Refusal(503, str(error)) from None
        rendered = metrics_text.render(self._engine, gauges)
        return web.Response(text=rendered, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def load(self, _: web.Request) -> web.Response:
        return reply({"server_load": self._engine.unanswered})

    async def version(self, _: web.Request) -> web.Response:
        return reply({"version": VERSION})

    async def models(self, _: web.Request) -> web.Response:
        settings = self._engine.settings
        model = {
            "id": settings.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": settings.model,
            "parent": None,
            "max_model_len": settings.spec.max_model_len,
        }
        adapters = [
            {**model, "id": name, "root": path, "parent": settings.model, "max_model_len": None}
            for name, path in self._engine.adapters.items()
        ]
        return reply({"object": "list", "data": [model, *adapters]})

    async def server_info(self, request: web.Request) -> web.Response:
        spec = self._engine.settings.spec
        config: Any = {
            "scheduler_config": {
                "max_num_seqs": spec.max_num_seqs,
                "max_num_batched_tokens": spec.max_num_batched_tokens,
                "policy": spec.scheduling,
            },
            "cache_config": {
                "block_size": spec.block_size,
                "num_gpu_blocks": spec.kv_blocks + 1,
                "enable_prefix_caching": spec.prefix_caching,
            },
            "model_config": {
                "max_model_len": spec.max_model_len,
                "dtype": DTYPE,
                "logprobs_mode": LOGPROBS_MODE,
            },
            "parallel_config": {"world_size": self._engine.settings.world_size},
            "weight_transfer_config": {"backend": "nccl"},
        }
        as_json = request.query.get("config_format") == "json"
        return reply({"vllm_config": config if as_json else str(config), "vllm_env": {}})

    async def is_paused(self, _: web.Request) -> web.Response:
        """As in vLLM the engine is asked, so a dead engine gives an error."""
        return reply({"is_paused": self._engine.paused})

    async def weight_info(self, _: web.Request) -> web.Response:
        told = self._engine.weights.told
        if told is None:
            raise Refusal(404, "Not Found")
        return reply({"weight_version": told})

    async def world_size(self, _: web.Request) -> web.Response:
        return reply({"world_size": self._engine.settings.world_size})
