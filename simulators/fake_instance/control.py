"""vLLM's endpoints besides those that generate: control, weights, tokens, health."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, get_args

import msgspec
from aiohttp import web

from rollout_sched.live.ports import InstanceError
from rollout_sched.simulators.fake_instance import metrics_text
from rollout_sched.simulators.fake_instance import synthetic_tokens as text
from rollout_sched.simulators.fake_instance.engine import Engine
from rollout_sched.simulators.fake_instance.errors import Refusal
from rollout_sched.simulators.fake_instance.request_parsing import Message, decode, words
from rollout_sched.simulators.instance.sim_request import PauseMode

#: The vLLM whose behaviour this is.
VERSION = "0.32.0"

Handler = Callable[[web.Request], Awaitable[web.Response]]


class _Ids(msgspec.Struct):
    request_ids: list[str] | None = None


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


class _Tokenize(msgspec.Struct):
    prompt: str | None = None
    messages: list[Message] | None = None


class _Detokenize(msgspec.Struct):
    tokens: list[int]


class Control:
    """The handlers, all of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def routes(self) -> list[web.RouteDef]:
        get: dict[str, Handler] = {
            "/health": self.health,
            "/metrics": self.metrics,
            "/load": self.load,
            "/version": self.version,
            "/v1/models": self.models,
            "/server_info": self.server_info,
            "/is_paused": self.is_paused,
            "/weight_info": self.weight_info,
        }
        post: dict[str, Handler] = {
            "/pause": self.pause,
            "/resume": self.resume,
            "/abort_requests": self.abort_any,
            "/inference/v1/abort_requests": self.abort,
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/update_weight_version": self.update_weight_version,
            "/collective_rpc": self.collective_rpc,
            "/init_weight_transfer_engine": self.init_weight_transfer_engine,
            "/start_weight_update": self.start_weight_update,
            "/update_weights": self.update_weights,
            "/finish_weight_update": self.finish_weight_update,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        return [
            *(web.get(path, handler, allow_head=False) for path, handler in get.items()),
            *(web.post(path, handler) for path, handler in post.items()),
        ]

    # -- looking ---------------------------------------------------------------------------

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.dead else 200)

    async def metrics(self, _: web.Request) -> web.Response:
        try:
            gauges = await self.engine.instance.gauges()
        except InstanceError as error:
            raise Refusal(503, str(error)) from None
        rendered = metrics_text.render(self.engine, gauges)
        return web.Response(text=rendered, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def load(self, _: web.Request) -> web.Response:
        return _json({"server_load": self.engine.unanswered})

    async def version(self, _: web.Request) -> web.Response:
        return _json({"version": VERSION})

    async def models(self, _: web.Request) -> web.Response:
        settings = self.engine.settings
        model = {
            "id": settings.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": settings.model,
            "parent": None,
            "max_model_len": settings.spec.max_model_len,
        }
        return _json({"object": "list", "data": [model]})

    async def server_info(self, request: web.Request) -> web.Response:
        spec = self.engine.settings.spec
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
            "model_config": {"max_model_len": spec.max_model_len},
        }
        as_json = request.query.get("config_format") == "json"
        return _json({"vllm_config": config if as_json else str(config), "vllm_env": {}})

    async def is_paused(self, _: web.Request) -> web.Response:
        return _json({"is_paused": self.engine.instance.paused})

    async def weight_info(self, _: web.Request) -> web.Response:
        return _json({"weight_version": self.engine.label})

    # -- requests --------------------------------------------------------------------------

    async def pause(self, request: web.Request) -> web.Response:
        mode: Any = request.query.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise Refusal(400, f"mode must be abort, wait or keep, got {mode!r}", "mode")
        await self.engine.pause(mode, _flag(request, "clear_cache", True))
        return _json({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        await self.engine.resume()
        return _json({"status": "resumed"})

    async def abort_any(self, request: web.Request) -> web.Response:
        """Without ids: all of them. What is unknown counts as well."""
        ids = decode(await request.read(), _Ids).request_ids
        if ids:
            await self._abort(ids)
            return _json({"status": "aborted", "aborted": len(ids)})
        return _json({"status": "aborted", "aborted": self.engine.instance.abort_all()})

    async def abort(self, request: web.Request) -> web.Response:
        ids = decode(await request.read(), _Ids).request_ids
        if ids is None:
            raise Refusal(400, "Missing 'request_ids' in request body")
        await self._abort(ids)
        return web.Response()

    async def _abort(self, ids: list[str]) -> None:
        for order_id in ids:
            await self.engine.instance.abort(order_id)

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        preempt = _flag(request, "reset_running_requests", False)
        return _json({"success": self.engine.instance.clear_cache(preempt)})

    # -- weights ---------------------------------------------------------------------------

    async def update_weight_version(self, request: web.Request) -> web.Response:
        label = decode(await request.read(), _NewVersion).new_version
        await self.engine.set_label(label)
        return _json({"success": True, "new_version": label})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        rpc = decode(await request.read(), _Rpc)
        if rpc.method != "reload_weights":
            raise Refusal(500, f"Call to collective_rpc method failed: {rpc.method!r} is unknown")
        await self.engine.reload_weights(rpc.kwargs.get("weights_path"))
        return _json({"results": [None]})

    async def init_weight_transfer_engine(self, request: web.Request) -> web.Response:
        decode(await request.read(), _InitInfo)
        self.engine.begin_transfer()
        return _json({"message": "Weight transfer initialized"})

    async def start_weight_update(self, _: web.Request) -> web.Response:
        self.engine.begin_session()
        return _json({"message": "Weight update started"})

    async def update_weights(self, request: web.Request) -> web.Response:
        decode(await request.read(), _UpdateInfo)
        await self.engine.receive_weights()
        return _json({"message": "Weights updated"})

    async def finish_weight_update(self, request: web.Request) -> web.Response:
        label = decode(await request.read() or b"{}", _Finish).weight_version
        await self.engine.end_session(label)
        return _json({"message": "Weight update finished"})

    # -- tokens ----------------------------------------------------------------------------

    async def tokenize(self, request: web.Request) -> web.Response:
        body = decode(await request.read(), _Tokenize)
        if body.messages is None and body.prompt is None:
            raise Refusal(400, "either prompt or messages must be given")
        prompt = words(body.messages) if body.messages is not None else body.prompt
        token_ids = text.encode(prompt or "")
        limit = self.engine.settings.spec.max_model_len
        count = len(token_ids)
        return _json(
            {"count": count, "max_model_len": limit, "tokens": token_ids, "token_strs": None}
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        token_ids = decode(await request.read(), _Detokenize).tokens
        return _json({"prompt": text.decode(token_ids)})


def _flag(request: web.Request, name: str, default: bool) -> bool:
    told = request.query.get(name)
    if told is None:
        return default
    if told.lower() not in ("true", "false", "1", "0"):
        raise Refusal(400, f"{name} must be true or false, got {told!r}", name)
    return told.lower() in ("true", "1")


def _json(content: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")
