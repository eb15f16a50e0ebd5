"""A server that answers as a vLLM 0.32 server was seen to answer, or as a test wants it to lie."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout_sched.live.ports import Order

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CACHE = 'block_size="32",engine="0",kv_cache_size_tokens="131072",num_gpu_blocks="4096"'
METRICS = f"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="tiny"}} 3.0
vllm:num_requests_waiting{{engine="0",model_name="tiny"}} 2.0
vllm:num_requests_waiting_by_reason{{engine="0",model_name="tiny",reason="capacity"}} 2.0
vllm:kv_cache_usage_perc{{engine="0",model_name="tiny"}} 0.25
vllm:num_preemptions_total{{engine="0",model_name="tiny"}} 7.0
vllm:num_preemptions_created{{engine="0",model_name="tiny"}} 1.7952339746249556e+09
vllm:prompt_tokens_by_source_total{{engine="0",model_name="tiny",source="local_compute"}} 622.0
vllm:prompt_tokens_by_source_total{{engine="0",model_name="tiny",source="local_cache_hit"}} 288.0
vllm:generation_tokens_total{{engine="0",model_name="tiny"}} 749.0
vllm:spec_decode_num_drafts_total{{engine="0",model_name="tiny"}} 30.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="tiny"}} 90.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="tiny"}} 60.0
vllm:cache_config_info{{{CACHE}}} 1.0
process_start_time_seconds 1.79523393016e+09
"""
GREEDY: dict[str, Any] = {"temperature": 0.0, "logprobs": 0}


def an_order(name: str = "a", tokens: int = 4, **more: Any) -> Order:
    sampling = more.pop("sampling", GREEDY)
    return Order(name, more.pop("token_ids", [5, 6, 7]), tokens, "3", sampling, **more)


def generated(
    token_ids: list[int],
    finish: str | None = "length",
    versions: list[tuple[str, int, int]] | None = None,
) -> dict[str, Any]:
    """An answer of /inference/v1/generate: log-prob -0.5 for an even token, -1.5 for an odd one."""
    content = [{"token_id": t, "logprob": -0.5 - t % 2, "rank": 1} for t in token_ids]
    spans = [{"version": v, "start": a, "end": b} for v, a, b in versions or []]
    choice = {
        "index": 0,
        "finish_reason": finish,
        "token_ids": token_ids,
        "weight_versions": spans if finish else None,
        "logprobs": {"content": content},
    }
    return {"request_id": "generate-tokens-a", "choices": [choice]}


def completed(token_ids: list[int], finish: str | None = "length") -> dict[str, Any]:
    """An answer of /v1/completions."""
    logprobs = {"token_logprobs": [-0.5 - t % 2 for t in token_ids], "tokens": ["w"]}
    choice = {"index": 0, "text": "w", "token_ids": token_ids, "finish_reason": finish}
    return {"id": "cmpl-a", "choices": [{**choice, "logprobs": logprobs}]}


def event(chunk: Any) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % json.dumps(chunk).encode()


class ScriptedVllm:
    """The endpoints with all flags on. Tests take paths out of `offered`, or replace handlers.

    `seen` keeps (path, body or query) of every call that is not a probe.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.api_key: str | None = None
        self.metrics = METRICS
        self.version = "0.32.0"
        self.weight_version = "default"
        self.server_info: Any = {"vllm_config": {"scheduler_config": {"max_num_seqs": 64}}}
        self.models: Any = {"data": [{"id": "tiny", "max_model_len": 8192}]}
        self.is_paused: Any = {"is_paused": False}
        self.scale_out = True
        self.handlers: dict[tuple[str, str], Handler] = {}
        self.missing: set[str] = set()
        self.failing: set[str] = set()
        self._url = ""
        for path in ("/pause", "/resume"):
            self.handlers["POST", path] = self._query_call
        for path in (
            "/collective_rpc",
            "/init_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/update_weight_version",
        ):
            self.handlers["POST", path] = self._body_call
        self.handlers |= {
            ("GET", "/v1/models"): self._told("models"),
            ("GET", "/server_info"): self._told("server_info"),
            ("GET", "/metrics"): self._metrics,
            ("GET", "/version"): self._version,
            ("GET", "/weight_info"): self._weight_info,
            ("GET", "/is_paused"): self._told("is_paused"),
            ("POST", "/abort_requests"): self._body_call,
            ("POST", "/inference/v1/abort_requests"): self._open_abort,
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/v1/completions"): self._complete,
        }

    @property
    def url(self) -> str:
        return self._url

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedVllm]:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._serve)
        async with TestServer(app, host="127.0.0.1") as server:
            self._url = str(server.make_url("/")).rstrip("/")
            yield self

    def answer(self, path: str, body: Any, status: int = 200) -> None:
        """From now on `path` answers POSTs with `body`, JSON or bytes."""

        async def handler(request: web.Request) -> web.StreamResponse:
            self.seen.append((path, await request.json()))
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            return web.Response(body=data, status=status, content_type="application/json")

        self._replace(path, handler)

    def stream(self, path: str, chunks: list[Any], gate: asyncio.Event | None = None) -> None:
        """From now on `path` streams `chunks` (JSON or raw bytes); before the last waits `gate`."""

        async def handler(request: web.Request) -> web.StreamResponse:
            self.seen.append((path, await request.json()))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for i, chunk in enumerate(chunks):
                if gate is not None and i == len(chunks) - 1:
                    await gate.wait()
                raw = chunk if isinstance(chunk, bytes) else event(chunk)
                await response.write(raw)
            await response.write_eof()
            return response

        self._replace(path, handler)

    def _replace(self, path: str, handler: Handler) -> None:
        probed = self.handlers["POST", path]

        async def choose(request: web.Request) -> web.StreamResponse:
            empty = await request.read() == b"{}"  # a probe: what it asks is still true
            return await (probed if empty else handler)(request)

        self.handlers["POST", path] = choose

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path in self.failing:
            return web.json_response({"error": "it failed"}, status=500)
        if path in self.missing:
            return web.json_response({"detail": "Not Found"}, status=404)
        guarded = path.startswith(("/v1", "/inference"))
        if (
            guarded
            and self.api_key
            and request.headers.get("Authorization") != f"Bearer {self.api_key}"
        ):
            return web.json_response({"error": "Unauthorized"}, status=401)
        if path.startswith("/inference/") and not self.scale_out:
            return web.json_response({"error": "Scale-out endpoints are disabled"}, status=403)
        handler = self.handlers.get((request.method, path))
        if handler is not None:
            return await handler(request)
        known = any(path == known for _, known in self.handlers)
        detail = "Method Not Allowed" if known else "Not Found"
        return web.json_response({"detail": detail}, status=405 if known else 404)

    def _told(self, attribute: str) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            return web.json_response(getattr(self, attribute))

        return handler

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self.metrics)

    async def _version(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"version": self.version})

    async def _weight_info(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"weight_version": self.weight_version})

    async def _query_call(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.path, dict(request.query)))
        return web.json_response({"status": "done"})

    async def _body_call(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append((request.path, body))
        return web.json_response({"results": [None]})

    async def _open_abort(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "request_ids" not in body:
            return web.json_response({"detail": "Missing 'request_ids'"}, status=400)
        self.seen.append((request.path, body))
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "token_ids" not in body:
            return web.json_response({"error": {"message": "Field required"}}, status=400)
        self.seen.append((request.path, body))
        tokens = list(range(10, 10 + body["sampling_params"]["max_tokens"]))
        return web.json_response(generated(tokens, "length", [("default", 0, len(tokens))]))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append((request.path, body))
        return web.json_response(completed(list(range(10, 10 + body["max_tokens"]))))
