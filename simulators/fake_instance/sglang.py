"""SGLang's endpoints in front of the same simulated engine, by its 0.5.23 (`fake-instance --dialect
sglang`): `/generate`, and what its trainers and routers call.

What would surprise a client is as there. Streams are cumulative; an abort ends every request whose
id begins with the given one; a new label aborts all requests unless it is told not to; weights
flush the cache unless they are told not to, and that fails while requests stand still in place.
Its OpenAI paths are not simulated.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web

from rollout_sched.core.model.records import Size
from rollout_sched.simulators.fake_instance import tokens
from rollout_sched.simulators.fake_instance.dialects import Dialect
from rollout_sched.simulators.fake_instance.engine import Engine, RankRange
from rollout_sched.simulators.fake_instance.requests import (
    ChoiceChunk,
    GenerationBody,
    Json,
    ParsedRequest,
    Refusal,
    RequestLimits,
    Tokens,
    decode,
    parsed,
    reply,
)

VERSION = "0.5.23"

#: vLLM's names of SGLang's sampling parameters, where they differ.
_SAMPLING = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    "custom_params": "extra_args",
}

# ------------------------------------------------------------------------------------------
# /generate.


class _Generate(GenerationBody, kw_only=True):
    rid: str | None = None
    text: str | None = None
    input_ids: Annotated[Tokens, msgspec.Meta(min_length=1)] | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool | None = None


class _Made:
    """What a stream has brought so far."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []

    def add(self, chunk: ChoiceChunk) -> None:
        self.text += chunk.said.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs or ()


class SglangDialect(Dialect):
    """One prompt and one response; `label()` is that of the present weights."""

    path = "/generate"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams: dict[str, _Made] = {}  # by request

    def parse(self, raw: bytes, headers: Mapping[str, str], limits: RequestLimits) -> ParsedRequest:
        body = decode(raw, _Generate)
        if (body.text is None) == (body.input_ids is None):
            raise Refusal(400, "Either text, input_ids or input_embeds should be provided.")
        prompt = body.input_ids or tokens.encode(body.text or "", limits.vocabulary)
        told = {_SAMPLING.get(k, k): v for k, v in (body.sampling_params or {}).items()}
        if told.get("top_k") == 0:
            raise Refusal(400, "top_k must be -1 (disable) or at least 1, got 0.")
        if told.get("n", 1) != 1:
            raise Refusal(400, "parallel samples are not simulated")
        told.setdefault("max_tokens", 128)
        if body.return_logprob:
            told["logprobs"] = 0
        rid = body.rid or secrets.token_hex(16)
        return parsed(body, limits, rid, {rid: prompt}, told)

    def answer(self, asked: ParsedRequest, choices: Sequence[Json], usage: Json | None) -> Json:
        return choices[0]

    def choice(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json:
        made = _Made() if chunk.first else self._streams[asked.id]
        made.add(chunk)
        if chunk.finish is None:
            self._streams[asked.id] = made
        else:
            self._streams.pop(asked.id, None)
        meta: Json = {
            "id": asked.id,
            "finish_reason": _finish(chunk, made),
            "prompt_tokens": asked.prompt_tokens,
            "completion_tokens": len(made.token_ids),
            "cached_tokens": 0,
            "weight_version": self._engine.weights.label,
        }
        if chunk.versions:
            meta["weight_versions"] = chunk.versions
            meta["weight_version"] = chunk.versions[-1]["version"]
        if asked.logprobs:
            pairs = zip(made.logprobs, made.token_ids, strict=True)
            meta["output_token_logprobs"] = [(value, token, None) for value, token in pairs]
        return {"text": made.text, "output_ids": list(made.token_ids), "meta_info": meta}


def _finish(chunk: ChoiceChunk, made: _Made) -> Json | None:
    match chunk.finish:
        case "stop":
            return {"type": "stop", "matched": chunk.said.stop or made.token_ids[-1]}
        case "length":
            return {"type": "length", "length": len(made.token_ids)}
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return None


# ------------------------------------------------------------------------------------------
# Its other endpoints.


class _Abort(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False


class _Pause(msgspec.Struct):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class _Label(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


class _LoadedWeights(msgspec.Struct):
    """The fields of every call that loads weights."""

    model_path: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class _UpdateGroup(msgspec.Struct):
    master_address: str
    master_port: int
    rank_offset: Size
    world_size: Size


class _Selector(msgspec.Struct):
    selector: Literal["target", "draft", "all"] = "all"


class _TokensOnly(msgspec.Struct):
    tokens: Tokens


class SglangEndpoints:
    """The engine's pauses, labels, weights, loads and sizes in SGLang's words."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self) -> list[web.RouteDef]:
        reads = {
            "/model_info": self.model_info,
            "/server_info": self.server_info,
            "/v1/loads": self.loads,
            "/ready": self.ready,
        }
        loads = ("disk", "distributed", "tensor", "ipc")
        return [
            *(web.get(path, handler, allow_head=False) for path, handler in reads.items()),
            *(web.post(f"/update_weights_from_{kind}", self.update_weights) for kind in loads),
            web.post("/abort_request", self.abort),
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.resume),
            web.post("/flush_cache", self.flush_cache),
            web.post("/update_weight_version", self.update_weight_version),
            web.post("/init_weights_update_group", self.init_group),
            web.post("/begin_weight_update", self.begin_update),
            web.post("/end_weight_update", self.end_update),
            web.post("/detokenize", self.detokenize),
        ]

    # -- what it is ------------------------------------------------------------------------

    async def model_info(self, _: web.Request) -> web.Response:
        model, label = self._engine.settings.model, self._engine.weights.reported_label
        return reply(
            {"model_path": model, "served_model_name": model, "weight_version": label or ""}
        )

    async def server_info(self, _: web.Request) -> web.Response:
        settings = self._engine.settings
        return reply(
            {
                "version": VERSION,
                "tp_size": settings.world_size,
                "pp_size": 1,
                "page_size": settings.spec.block_size,
                "chunked_prefill_size": settings.spec.max_num_batched_tokens,
                "disable_radix_cache": not settings.spec.prefix_caching,
            }
        )

    async def loads(self, _: web.Request) -> web.Response:
        spec = self._engine.settings.spec
        gauges = await self._engine.instance.gauges()
        size = spec.kv_blocks * spec.block_size
        load = {
            "dp_rank": 0,
            "num_running_reqs": gauges.running,
            "num_waiting_reqs": gauges.waiting,
            "num_used_tokens": round(gauges.kv_usage * size),
            "max_total_num_tokens": size,
            "max_running_requests": spec.max_num_seqs,
            "token_usage": gauges.kv_usage,
            "total_prefill_uncached_tokens": gauges.prefill_tokens,
        }
        return reply({"version": VERSION, "loads": [load]})

    async def ready(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._engine.paused else 200)

    async def detokenize(self, request: web.Request) -> web.Response:
        token_ids = decode(await request.read(), _TokensOnly).tokens
        return reply({"text": tokens.decode(token_ids, self._engine.settings.vocabulary)})

    # -- requests and pauses ---------------------------------------------------------------

    async def abort(self, request: web.Request) -> web.Response:
        """A request that is not there aborts none that begin like it."""
        asked = decode(await request.read(), _Abort)
        instance = self._engine.instance
        if asked.abort_all:
            instance.abort_all()
        elif asked.rid and instance.runs(asked.rid):
            instance.abort_all(asked.rid)
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        mode = decode(await request.read(), _Pause).mode
        await self._engine.pause("abort" if mode == "abort" else "keep", mode == "retract")
        return reply({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, _: web.Request) -> web.Response:
        await self._engine.resume()
        return reply({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, _: web.Request) -> web.Response:
        flushed = self._engine.instance.clocked.clear_cache(preempt=False)
        return web.Response(status=200 if flushed else 400)

    # -- weights ---------------------------------------------------------------------------

    async def update_weight_version(self, request: web.Request) -> web.Response:
        asked = decode(await request.read(), _Label)
        if asked.abort_all_requests:
            self._engine.instance.abort_all()
        await self._engine.weights.set_label(asked.new_version)
        return reply({"success": True, "new_version": asked.new_version})

    async def init_group(self, request: web.Request) -> web.Response:
        told = decode(await request.read(), _UpdateGroup)
        group, ranks = f"{told.master_address}:{told.master_port}", self._engine.settings.world_size
        place = RankRange(group, told.rank_offset, ranks, told.world_size)
        return await _tried(self._engine.weights.init_transfer(place))

    async def begin_update(self, request: web.Request) -> web.Response:
        draft = decode(await request.read(), _Selector).selector == "draft"
        weights = self._engine.weights
        await weights.init_transfer()  # tensors need no group
        weights.start_update("draft" if draft else "model")
        return _done()

    async def update_weights(self, request: web.Request) -> web.Response:
        asked = decode(await request.read(), _LoadedWeights)
        engine = self._engine
        if asked.abort_all_requests:
            engine.instance.abort_all()
        weights = engine.weights
        if request.path.endswith("disk"):
            loading = weights.reload(asked.model_path)
        elif request.path.endswith("ipc"):
            await weights.init_transfer()
            loading = weights.receive()
        else:
            loading = weights.update()
        answer = await _tried(loading)
        if asked.flush_cache and not engine.instance.clocked.clear_cache(preempt=False):
            message = "Weights were updated, but the cache was not flushed"
            return reply({"success": False, "message": message}, 400)
        if asked.weight_version is not None:
            await weights.set_label(asked.weight_version)
        return answer

    async def end_update(self, _: web.Request) -> web.Response:
        return await _tried(self._engine.weights.finish_update(None))


async def _tried(doing: Awaitable[None]) -> web.Response:
    try:
        await doing
    except Refusal as refusal:
        return reply({"success": False, "message": str(refusal)}, 400)
    return _done()


def _done() -> web.Response:
    return reply({"success": True, "message": "Success"})
