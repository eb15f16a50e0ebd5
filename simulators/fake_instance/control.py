"""Endpoints that control a server and its requests: pause, resume, abort, reset the cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import msgspec
from aiohttp import web

from rollout_sched.integrations.vllm.protocol import endpoints as names
from rollout_sched.live.ports import Gauges, InstanceError
from rollout_sched.simulators.fake_instance import tokens as text
from rollout_sched.simulators.fake_instance.engine import Engine
from rollout_sched.simulators.fake_instance.requests import (
    Message,
    Refusal,
    decode,
    flag,
    prompt_text,
    reply,
)
from rollout_sched.simulators.instance import PauseMode

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


# ------------------------------------------------------------------------------------------
# The part of vLLM's /metrics that shows a server's load.

Values = Iterator[tuple[str, str, Mapping[str, object], float]]


def render(engine: Engine, gauges: Gauges) -> str:
    """The metrics in Prometheus' text format. Unlike vLLM's, the prompt counters also count tokens
    that are computed again after a preemption."""
    lines: list[str] = []
    last = ""
    for name, kind, labels, value in _values(engine, gauges):
        if name != last:
            lines.append(f"# TYPE {name} {kind}")
            last = name
        told = ",".join(f'{key}="{label}"' for key, label in labels.items())
        lines.append(f"{name}{{{told}}} {value}" if told else f"{name} {value}")
    return "\n".join(lines) + "\n"


def _values(engine: Engine, gauges: Gauges) -> Values:
    spec = engine.settings.spec
    own = {"engine": "0", "model_name": engine.settings.model}
    computed, cached = gauges.prefill_tokens, gauges.cached_tokens
    yield names.STARTED_AT, "gauge", {}, engine.started_at
    for name, value in {
        names.RUNNING: gauges.running,
        names.WAITING: gauges.waiting,
        names.KV_USAGE: gauges.kv_usage,
    }.items():
        yield name, "gauge", own, float(value)
    for reason, value in {"capacity": gauges.waiting, "deferred": 0}.items():
        name = "vllm:num_requests_waiting_by_reason"
        yield name, "gauge", {**own, "reason": reason}, float(value)
    for name, value in {
        names.PREEMPTIONS: gauges.preemptions,
        "vllm:prefix_cache_queries_total": computed + cached,
        "vllm:prefix_cache_hits_total": cached,
        "vllm:prompt_tokens_total": computed + cached,
        "vllm:prompt_tokens_cached_total": cached,
        names.GENERATED_TOKENS: gauges.generated_tokens,
        **(_drafts(gauges) if spec.speculation is not None else {}),
    }.items():
        yield name, "counter", own, float(value)
    sources = {names.COMPUTED: computed, names.CACHED: cached, "external_kv_transfer": 0}
    for source, value in sources.items():
        yield names.PROMPT_TOKENS, "counter", {**own, "source": source}, float(value)
    for finish, value in engine.finished.items():
        name = "vllm:request_success_total"
        yield name, "counter", {**own, "finished_reason": finish}, float(value)
    config = {
        **own,
        "block_size": spec.block_size,
        "enable_prefix_caching": spec.prefix_caching,
        "kv_cache_size_tokens": spec.kv_blocks * spec.block_size,
        "num_gpu_blocks": spec.kv_blocks + 1,  # with vLLM's null block
    }
    yield names.CACHE_CONFIG, "gauge", config, 1.0


def _drafts(gauges: Gauges) -> dict[str, int]:
    return {
        names.DRAFTS: gauges.drafts,
        names.DRAFTED_TOKENS: gauges.drafted_tokens,
        names.ACCEPTED_TOKENS: gauges.accepted_tokens,
    }


# ------------------------------------------------------------------------------------------
# The endpoints that report a server's health, load, model and configuration.

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
            "/metrics": self.metrics,
            "/load": self.load,
            "/version": self.version,
            "/server_info": self.server_info,
            "/is_paused": self.is_paused,
            "/weight_info": self.weight_info,
            "/get_world_size": self.world_size,
        }
        return [web.get(path, handler, allow_head=False) for path, handler in handlers.items()]

    async def metrics(self, _: web.Request) -> web.Response:
        try:
            gauges = await self._engine.instance.gauges()
        except InstanceError as error:
            raise Refusal(503, str(error)) from None
        rendered = render(self._engine, gauges)
        return web.Response(text=rendered, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def load(self, _: web.Request) -> web.Response:
        return reply({"server_load": self._engine.unanswered})

    async def version(self, _: web.Request) -> web.Response:
        return reply({"version": f"{self._engine.settings.as_vllm}.0"})

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
        """The engine is asked, as in vLLM, so a dead engine gives an error."""
        return reply({"is_paused": self._engine.paused})

    async def weight_info(self, _: web.Request) -> web.Response:
        told = self._engine.weights.reported_label
        if told is None:
            raise Refusal(404, "Not Found")
        return reply({"weight_version": told})

    async def world_size(self, _: web.Request) -> web.Response:
        return reply({"world_size": self._engine.settings.world_size})


# ------------------------------------------------------------------------------------------
# LoRA adapters, by the paths of vLLM, of SkyRL (0.3.0) and of prime-rl (2026-08).
#
# Their effect on the text is not simulated: a request may name one as its model.


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


# ------------------------------------------------------------------------------------------
# Turn text into tokens and back: /tokenize, /detokenize, and a chat's prompt.


class _Render(msgspec.Struct):
    messages: list[Message]


class _Detokenize(msgspec.Struct):
    tokens: list[int]


class Tokenizer:
    """Endpoints for tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/detokenize", self.detokenize),
            web.post("/v1/chat/completions/render", self.render),
        ]

    async def detokenize(self, request: web.Request) -> web.Response:
        token_ids = decode(await request.read(), _Detokenize).tokens
        return reply({"prompt": text.decode(token_ids, self._engine.settings.vocabulary)})

    async def render(self, request: web.Request) -> web.Response:
        """A chat as a request of /inference/v1/generate."""
        messages = decode(await request.read(), _Render).messages
        token_ids = text.encode(prompt_text(messages), self._engine.settings.vocabulary)
        model = self._engine.settings.model
        return reply(
            {"model": model, "token_ids": token_ids, "features": None, "sampling_params": {}}
        )


# ------------------------------------------------------------------------------------------
# What both engines answer alike.


class _Tokenize(msgspec.Struct):
    prompt: str | None = None
    messages: list[Message] | None = None


class SharedEndpoints:
    """Health, the served models, and tokens of a text."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health, allow_head=False),
            web.get("/liveness", self.health, allow_head=False),
            web.get("/v1/models", self.models, allow_head=False),
            web.post("/tokenize", self.tokenize),
        ]

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._engine.dead else 200)

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

    async def tokenize(self, request: web.Request) -> web.Response:
        body = decode(await request.read(), _Tokenize)
        if body.messages is None and body.prompt is None:
            raise Refusal(400, "either prompt or messages must be given")
        prompt = prompt_text(body.messages) if body.messages is not None else body.prompt
        token_ids = text.encode(prompt or "", self._engine.settings.vocabulary)
        limit = self._engine.settings.spec.max_model_len
        count = len(token_ids)
        return reply(
            {"count": count, "max_model_len": limit, "tokens": token_ids, "token_strs": None}
        )
